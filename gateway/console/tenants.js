// Tenants: what they use, their limits, edited in place, and their keys.

import { keyPanel, tenantForm } from "./accounts.js";
import { Refusal, admin } from "./api.js";
import { busy, h, keyed, setText, toast } from "./dom.js";
import { ago, compact, count, parseLimit, span } from "./format.js";

const LIMITS = {
  requests_per_minute: "requests a minute",
  tokens_per_minute: "tokens a minute",
  concurrent_requests: "requests at once",
  tokens_per_day: "tokens a day",
};

const WINDOW = "Recent use is measured by the gateway process that answers, between two looks at the usage books, and names the time it covers.";
const SHORT = ["requests/min", "tokens/min", "at once", "tokens/day"];

export const tenants = {
  sections: ["tenants"],
  mount(content, { refresh }) {
    const list = h("div", { class: "tenants" }, h("p", { class: "muted", "data-empty": true }, "There are no tenants."));
    let entries = new Map();
    let keys = null;
    const learn = async () => {
      const [limits, accounts] = await Promise.all([admin("GET", "limits"), accountsOf()]);
      entries = Map.groupBy(limits.limits, (entry) => entry.tenant);
      keys = accounts && Map.groupBy(accounts.keys, (key) => key.tenant);
      form.hidden = keys === null;
      await refresh();
    };
    const form = tenantForm(learn);
    content.append(h("h1", {}, "Tenants"), list, form, h("p", { class: "fine" }, WINDOW));
    learn().catch((error) => toast(error.message, "bad"));
    return {
      update(seen) {
        const known = seen.tenants.filter((use) => entries.has(use.tenant));
        const card = (use) => tenantCard(use, learn);
        const told = known.map((use) => ({ use, entries: entries.get(use.tenant), keys: keys && (keys.get(use.tenant) ?? []) }));
        keyed(list, told, ({ use }) => use.tenant, card);
      },
    };
  },
};

/** All keys; null where this gateway's tenants are not administered over HTTP. */
async function accountsOf() {
  try {
    return await admin("GET", "keys");
  } catch (error) {
    if (error instanceof Refusal && error.status === 404) return null;
    throw error;
  }
}

function tenantCard({ use: { tenant } }, learn) {
  const busyness = h("span", { class: "muted" });
  const refusal = h("p", { class: "refusal", hidden: true });
  const rows = Object.keys(LIMITS).map((name) => limitRow(tenant, name, learn));
  const spent = h("p", { class: "spent" });
  const account = keyPanel(tenant, learn);
  const accounts = h("details", {}, h("summary", {}, "Keys"), account.node);
  const scopes = h("tbody");
  const heads = ["Of", ...SHORT, ""].map((title) => h("th", { scope: "col" }, title));
  const table = h("table", { class: "scopes" }, h("thead", {}, h("tr", {}, ...heads)), scopes);
  const node = h(
    "section",
    { class: "card tenant", "aria-label": `Tenant ${tenant}` },
    h("div", { class: "head" }, h("h2", {}, tenant), busyness),
    refusal,
    spent,
    h("div", { class: "limits" }, ...rows.map((row) => row.node)),
    accounts,
    h("details", {}, h("summary", {}, "Limits of keys and adapters"), h("div", { class: "scroll" }, table)),
  );
  const update = ({ use, entries, keys }) => {
    accounts.hidden = keys === null;
    if (keys) account.update(keys);
    setText(spent, spentWords(use.used));
    const reserved = use.reserved_tokens ? ` · ${compact(use.reserved_tokens)} tokens reserved` : "";
    setText(busyness, `${count(use.running)} running · ${count(use.waiting)} waiting${reserved}`);
    refusal.hidden = use.refused_at === null;
    if (use.refused_at !== null) {
      const why = use.refused_by.map((name) => LIMITS[name]).join(", ");
      setText(refusal, `Last refused ${ago(use.refused_at)}, for ${why}`);
    }
    const own = entries.find((entry) => !entry.key && !entry.adapter);
    for (const row of rows) row.update(use.limits.find((limit) => limit.name === row.name), own);
    const others = entries.filter((entry) => entry !== own);
    keyed(scopes, others, (entry) => `${entry.key} ${entry.adapter}`, (entry) => scopeRow(entry, learn));
  };
  return { node, update };
}

/** What settled requests have used; what runs is `reserved` beside the name. It names the time that it covers. */
function spentWords(used) {
  if (!used) return "Nothing used today.";
  const { recently, today, window_seconds: window } = used;
  const words = ({ tokens, requests }) => `${compact(tokens)} tokens, ${count(requests)} requests`;
  const named = Math.abs(window - 60) < 6 ? "Last minute" : `Last ${Math.round(window)} s`;
  return `${window < 1 ? "Last minute: known in a few seconds" : `${named}: ${words(recently)}`} · today: ${words(today)}`;
}

function limitRow(tenant, name, learn) {
  const field = limitField({ tenant }, name, `${LIMITS[name]} of ${tenant}`, learn);
  const bar = h("div", { class: "use" }, h("span"));
  const left = h("small");
  const node = h("div", { class: "limit" }, h("label", { for: field.node.id }, LIMITS[name]), field.node, bar, left);
  const update = (use, entry) => {
    field.update(entry);
    const limit = use?.limit ?? null;
    bar.hidden = limit === null;
    const part = limit ? use.used / limit : 0;
    bar.firstElementChild.style.width = `${Math.min(1, part) * 100}%`;
    bar.classList.toggle("full", part >= 0.9);
    setText(left, limit === null ? used(use) : `${compact(use.used)} counted, ${remaining(use)}`);
  };
  return { node, update, name };
}

function used(use) {
  return use?.used ? `${compact(use.used)} used, not limited` : "not limited";
}

function remaining(use) {
  const shadow = use.shadow ? " · in shadow" : "";
  const refused = use.refused_today ? ` · ${count(use.refused_today)} ${use.shadow ? "would be " : ""}refused today` : "";
  const debt = use.used > use.limit ? `in debt, free in ${span(use.reset_seconds ?? 0)}` : `${compact(use.remaining)} available now`;
  return debt + shadow + refused;
}

function scopeRow(first, learn) {
  const scope = { tenant: first.tenant, key: first.key, adapter: first.adapter };
  const of = first.key ? (first.key === "*" ? "each key" : `key ${first.key}`) : first.adapter === "*" ? "each adapter" : first.adapter;
  const fields = Object.keys(LIMITS).map((name) => ({ name, ...limitField(scope, name, `${LIMITS[name]} of ${of}`, learn) }));
  const reset = h("button", { type: "button", class: "quiet", on: { click: () => busy(reset, forget) } }, "Reset");
  const forget = async () => {
    await admin("POST", "limits/reset", scope);
    toast(`Limits of ${of} are as configured`);
    await learn();
  };
  const cells = fields.map((field) => h("td", {}, field.node));
  const node = h("tr", {}, h("th", { scope: "row" }, of), ...cells, h("td", { class: "end" }, reset));
  const update = (entry) => {
    for (const field of fields) field.update(entry);
    reset.hidden = entry.source !== "live";
  };
  return { node, update };
}

let inputs = 0;

/** One limit to type into: Enter or leaving it sends it, Escape takes it back. */
function limitField(scope, name, label, learn) {
  let value = null;
  const shown = () => (value === null ? "" : count(value));
  const accept = async () => {
    input.removeAttribute("aria-invalid");
    if (input.value === shown()) return;
    try {
      await send(parseLimit(input.value));
    } catch (error) {
      // It stays as it was typed, and red, until it is corrected or Escape takes it back.
      input.setAttribute("aria-invalid", "true");
      toast(error.message, "bad");
    }
  };
  const send = async (wanted) => {
    input.disabled = true;
    try {
      const entry = await admin("PATCH", "limits", { ...scope, [name]: wanted });
      value = entry[name];
      input.value = shown();
      toast(`${label}: ${value === null ? "no limit" : count(value)}, from the next request on`);
    } finally {
      input.disabled = false;
    }
    learn().catch((error) => toast(error.message, "bad"));
  };
  const key = (event) => {
    if (event.key === "Enter") input.blur();
    if (event.key === "Escape") {
      input.value = shown();
      input.removeAttribute("aria-invalid");
      input.blur();
    }
  };
  const attributes = { id: `limit-${++inputs}`, class: "edit", inputmode: "numeric", autocomplete: "off", placeholder: "no limit" };
  const on = { change: accept, keydown: key, focus: () => input.select() };
  const input = h("input", { ...attributes, "aria-label": label, on });
  const update = (entry) => {
    if (document.activeElement === input || input.disabled || input.hasAttribute("aria-invalid")) return;
    value = entry[name];
    if (input.value !== shown()) input.value = shown();
    input.title = entry.source === "live" ? "Changed live" : "As configured";
  };
  return { node: input, update };
}
