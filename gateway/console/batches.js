// Batches of all tenants or of one, unfinished or all: progress, time left, tokens; cancel.

import { admin } from "./api.js";
import { careful, h, keyed, setText, toast } from "./dom.js";
import { ago, compact, count, span } from "./format.js";

const KINDS = { unfinished: "Unfinished", all: "Newest" };
const NOTHING = { unfinished: "No batch is unfinished.", all: "There is no batch." };
const TITLES = ["Batch", "Tenant", "Progress", "Tokens", "Time left", "Window", ""];
const ENDED = new Set(["failed", "completed", "expired", "cancelled"]);

export const batches = {
  sections: [],
  mount(content, { refresh }) {
    let kind = "unfinished";
    const choose = (name) => {
      kind = name;
      tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(Object.keys(KINDS)[i] === name)));
      return refresh();
    };
    const tabs = Object.entries(KINDS).map(([name, label]) =>
      h("button", { type: "button", class: "quiet", "aria-pressed": String(name === kind), on: { click: () => choose(name) } }, label),
    );
    const tenant = h("input", { type: "search", placeholder: "A tenant’s name", "aria-label": "Tenant", on: { change: () => refresh() } });
    const summary = h("span", { class: "muted" });
    const nothing = h("td", { colspan: TITLES.length });
    const body = h("tbody", {}, h("tr", { "data-empty": true }, nothing));
    const heads = TITLES.map((title) => h("th", { scope: "col" }, title || h("span", { class: "hidden" }, "Actions")));
    const table = h("table", { class: "batches" }, h("thead", {}, h("tr", {}, ...heads)), body);
    const title = h("h2", {}, KINDS[kind]);
    const head = h("div", { class: "head" }, title, summary, h("div", { class: "tabs" }, ...tabs), tenant);
    content.append(h("h1", {}, "Batches"), h("section", { class: "card", "aria-label": "Batches" }, head, table));
    return {
      async update() {
        const name = tenant.value.trim();
        const which = kind;
        const asked = new URLSearchParams({ which, ...(name ? { tenant: name } : {}) });
        const answer = await admin("GET", `batches?${asked}`);
        if (which !== kind || name !== tenant.value.trim()) return; // another question has been asked meanwhile
        setText(title, name ? `${KINDS[kind]} of ${name}` : KINDS[kind]);
        setText(summary, answer.batches.length ? count(answer.batches.length) : "");
        setText(nothing, NOTHING[kind]);
        keyed(body, answer.batches, (batch) => batch.id, (batch) => batchRow(batch, refresh));
      },
    };
  },
};

function batchRow(first, refresh) {
  const state = h("span", { class: "badge" });
  const progress = h("progress", { "aria-label": "Lines that have ended" });
  const lines = h("span", { class: "number" });
  const cells = ["Tokens", "Time left", "Window"].map((title) => h("td", { class: "number", "data-title": title }));
  const stop = careful("Cancel", "Really cancel?", async () => {
    await admin("POST", `batches/${encodeURIComponent(first.tenant)}/${first.id}/cancel`);
    toast(`${first.id} is being cancelled`);
    await refresh();
  }, { class: "quiet danger", "aria-label": `Cancel ${first.id}` });
  const node = h(
    "tr",
    {},
    h("td", {}, h("b", {}, first.model ?? "several models"), " ", state, h("small", {}, `${first.id} · ${first.endpoint}`)),
    h("td", { "data-title": "Tenant" }, first.tenant),
    h("td", { "data-title": "Progress" }, progress, lines),
    ...cells,
    h("td", { class: "end" }, stop),
  );
  const update = (batch) => {
    const { total, completed, failed } = batch.request_counts;
    setText(state, batch.status.replace("_", " "));
    state.className = `badge ${batch.status}`;
    progress.max = Math.max(1, total);
    progress.value = completed + failed;
    setText(lines, `${count(completed + failed)} of ${total ? count(total) : "?"} lines${failed ? `, ${count(failed)} failed` : ""}`);
    const left = batch.eta_seconds === null ? "unknown" : span(batch.eta_seconds);
    const ended = ENDED.has(batch.status);
    setText(cells[0], compact(batch.usage.total_tokens));
    setText(cells[1], ended ? `ended ${ago(endOf(batch))}` : left);
    setText(cells[2], ended ? batch.completion_window : `ends in ${span(Math.max(0, batch.expires_at - Date.now() / 1000))}`);
    stop.hidden = ended || batch.status === "cancelling";
  };
  return { node, update };
}

const endOf = (batch) => batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at ?? batch.created_at;
