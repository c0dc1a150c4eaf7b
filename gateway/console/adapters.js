// Adapters: where they are, who uses them; load, pin, unload.

import { admin } from "./api.js";
import { busy, careful, h, keyed, setText, toast } from "./dom.js";
import { compact, count, span } from "./format.js";

const MOST_ROWS = 200;
const TIERS = { resident: "on the device", host: "in host memory", fetching: "being read", disk: "on disk" };

export const adapters = {
  sections: ["adapters"],
  mount(content, { refresh }) {
    const search = h("input", { type: "search", placeholder: "Find by name, tier or tenant", "aria-label": "Find adapters" });
    const summary = h("span", { class: "muted" });
    const columns = ["Name", "Tier", "Rank", "Pages", "Hits", "Now", "Idle", ""];
    const heads = columns.map((title) => h("th", { scope: "col" }, title || h("span", { class: "hidden" }, "Actions")));
    const none = h("tr", { "data-empty": true }, h("td", { colspan: columns.length }, "No adapter is like that."));
    const body = h("tbody", {}, none);
    const table = h("table", { class: "adapters" }, h("thead", {}, h("tr", {}, ...heads)), body);
    let last = [];
    const draw = () => {
      const found = last.filter((adapter) => matches(adapter, search.value.trim().toLowerCase()));
      keyed(body, found.slice(0, MOST_ROWS), (adapter) => `${adapter.base_model} ${adapter.name}`, (adapter) => adapterRow(adapter, refresh));
      const more = found.length > MOST_ROWS ? `, the first ${MOST_ROWS} of ${count(found.length)}` : "";
      setText(summary, `${count(last.length)} in all${more}`);
    };
    search.addEventListener("input", draw);
    const head = h("div", { class: "head" }, h("h2", {}, "Served"), summary, search);
    const list = h("section", { class: "card", "aria-label": "Adapters" }, head, table);
    content.append(h("h1", {}, "Adapters"), loadForm(refresh), list);
    return {
      update(seen) {
        last = seen.adapters;
        draw();
      },
    };
  },
};

function matches(adapter, text) {
  return [adapter.name, adapter.base_model, ...adapter.aliases, adapter.tier, ...adapter.tenants].some((word) => word.toLowerCase().includes(text));
}

function loadForm(refresh) {
  const field = (label, name, extra = {}) => h("label", {}, label, h("input", { name, autocomplete: "off", spellcheck: "false", ...extra }));
  const again = h("label", { class: "check" }, h("input", { type: "checkbox", name: "replace" }), h("span", {}, "Replace the version served now"));
  const button = h("button", { class: "primary", type: "submit" }, "Load");
  const submit = (event) => {
    event.preventDefault();
    busy(button, async () => {
      const given = new FormData(form);
      const text = (name) => String(given.get(name) ?? "").trim();
      const tenants = text("tenants").split(/[\s,]+/).filter(Boolean);
      const body = { name: text("name"), source: text("source"), base_model: text("base_model"), replace: given.has("replace"), tenants };
      const adapter = await admin("POST", "adapters", body);
      toast(`${adapter.name} is loaded: rank ${adapter.rank}, ${count(adapter.pages)} pages`);
      form.reset();
      await refresh();
    });
  };
  const form = h(
    "form",
    { class: "card load", "aria-label": "Load an adapter", on: { submit } },
    h("div", { class: "head" }, h("h2", {}, "Load an adapter")),
    h(
      "div",
      { class: "fields" },
      field("Name", "name", { required: true, placeholder: "support" }),
      field("Folder or hub id", "source", { required: true, placeholder: "/srv/loras/support" }),
      field("Base model", "base_model", { placeholder: "as its files say" }),
      field("Only for these tenants", "tenants", { placeholder: "all tenants" }),
      button,
    ),
    again,
  );
  return form;
}

function adapterRow(first, refresh) {
  const { name } = first;
  const path = `adapters/${name.split("/").map(encodeURIComponent).join("/")}`;
  const cell = (title, props = {}) => h("td", { "data-title": title, ...props });
  const about = h("small");
  const tier = h("span", { class: "badge" });
  const failure = h("p", { class: "error", hidden: true });
  const numbers = ["Rank", "Pages", "Hits", "Now", "Idle"].map((title) => cell(title, { class: "number" }));
  const pin = h("button", { type: "button", class: "quiet pin", on: { click: () => busy(pin, change) } }, "Pin");
  const change = async () => {
    const pinned = pin.getAttribute("aria-pressed") === "true";
    await admin("POST", `${path}/${pinned ? "unpin" : "pin"}`);
    pin.setAttribute("aria-pressed", String(!pinned));
    toast(`${name} is ${pinned ? "not pinned any more" : "pinned"}`);
    await refresh();
  };
  const unload = careful("Unload", "Really unload?", async () => {
    const { aborted } = await admin("DELETE", `${path}?base_model=${encodeURIComponent(first.base_model)}`);
    toast(`${name} is unloaded${aborted ? `; ${count(aborted)} requests were aborted` : ""}`);
    await refresh();
  }, { class: "quiet danger", "aria-label": `Unload ${name}` });
  const node = h(
    "tr",
    {},
    h("td", {}, h("b", {}, name), about, failure),
    h("td", { "data-title": "Tier" }, tier),
    ...numbers,
    h("td", { class: "end" }, pin, unload),
  );
  const update = (adapter) => {
    const others = [...adapter.aliases, ...adapter.tenants.map((tenant) => `only ${tenant}`)];
    setText(about, [adapter.version.slice(0, 12), adapter.base_model, ...others].join(" · "));
    setText(tier, adapter.tier);
    tier.className = `badge ${adapter.tier}`;
    tier.title = TIERS[adapter.tier] ?? adapter.tier;
    const now = [[adapter.running, "running"], [adapter.waiting, "waiting"]].filter(([number]) => number);
    const idle = adapter.idle_seconds === null ? "never used" : span(adapter.idle_seconds);
    const texts = [count(adapter.rank), compact(adapter.pages), compact(adapter.hits), now.map(([number, word]) => `${count(number)} ${word}`).join(", ") || "–", idle];
    texts.forEach((text, i) => setText(numbers[i], text));
    pin.setAttribute("aria-pressed", String(adapter.pinned));
    pin.setAttribute("aria-label", `Pin ${name}`);
    failure.hidden = !adapter.error;
    setText(failure, adapter.error);
  };
  return { node, update };
}
