// Creating tenants and keys, and switching keys off.

import { admin } from "./api.js";
import { copied } from "./clipboard.js";
import { busy, careful, h, keyed, setText, toast } from "./dom.js";
import { ago } from "./format.js";

/** A form that creates a tenant. `learn` is called when there is a new one. */
export function tenantForm(learn) {
  const field = (label, name, extra) => h("label", {}, label, h("input", { name, autocomplete: "off", spellcheck: "false", ...extra }));
  const lane = h("select", { name: "lane" }, h("option", { value: "interactive" }, "interactive"), h("option", { value: "batch" }, "batch"));
  const button = h("button", { class: "primary", type: "submit" }, "Create");
  const submit = (event) => {
    event.preventDefault();
    busy(button, async () => {
      const given = new FormData(form);
      const adapters = String(given.get("adapters")).split(/[\s,]+/).filter(Boolean);
      const body = { name: String(given.get("name")).trim(), default_lane: given.get("lane"), ...(adapters.length ? { adapters } : {}) };
      const tenant = await admin("POST", "tenants", body);
      toast(`Tenant ${tenant.name} is created: give it a key below its name`);
      form.reset();
      await learn();
    });
  };
  const form = h(
    "form",
    { class: "card load", "aria-label": "Create a tenant", on: { submit } },
    h("div", { class: "head" }, h("h2", {}, "Create a tenant")),
    h(
      "div",
      { class: "fields" },
      field("Name", "name", { required: true, placeholder: "initech", maxlength: 64 }),
      field("Adapters it may use", "adapters", { placeholder: "all" }),
      h("label", {}, "Default lane", lane),
      button,
    ),
  );
  return form;
}

/** The keys of one tenant, and a form for another. */
export function keyPanel(tenant, learn) {
  const list = h("ul", { class: "keys" }, h("li", { class: "muted", "data-empty": true }, "It has no keys yet."));
  const label = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "label", "aria-label": `Label of a new key of ${tenant}`, maxlength: 64 });
  const button = h("button", { type: "submit", class: "quiet" }, "Create a key");
  const shown = h("div", { class: "new-key", hidden: true });
  const submit = (event) => {
    event.preventDefault();
    busy(button, async () => {
      const key = await admin("POST", "keys", { tenant, label: label.value.trim() });
      label.value = "";
      show(shown, key);
      await learn();
    });
  };
  const form = h("form", { class: "row", on: { submit } }, label, button);
  const update = (keys) => keyed(list, keys, (key) => key.id, (key) => keyRow(key, learn));
  return { node: h("div", { class: "key-panel" }, list, form, shown), update };
}

/** A new key is shown once: the gateway keeps its hash alone. */
function show(place, key) {
  const done = h("button", { type: "button", class: "quiet", on: { click: () => { place.replaceChildren(); place.hidden = true; } } }, "Done");
  const words = h("p", {}, "Copy the key now: it is not shown again.");
  place.replaceChildren(words, h("code", {}, key.key), copied("Copy", () => key.key), done);
  place.hidden = false;
}

function keyRow(first, learn) {
  const about = h("small");
  const state = h("span", { class: "badge" });
  const act = async (action) => {
    await admin("POST", `keys/${encodeURIComponent(first.id)}/${action}`);
    toast(`Key ${first.id} is ${action}d, from the next request on`);
    await learn();
  };
  const off = careful("Disable", "Really disable?", () => act("disable"), { class: "quiet danger", "aria-label": `Disable key ${first.id}` });
  const on = h("button", { type: "button", class: "quiet", "aria-label": `Enable key ${first.id}`, on: { click: () => busy(on, () => act("enable")) } }, "Enable");
  const node = h("li", {}, h("span", {}, h("b", {}, first.label || first.id), " ", state, about), h("span", { class: "actions" }, off, on));
  const update = (key) => {
    setText(about, `${key.label ? `${key.id} · ` : ""}created ${ago(key.created)}`);
    state.hidden = !key.disabled;
    setText(state, "disabled");
    off.hidden = key.disabled;
    on.hidden = !key.disabled;
  };
  return { node, update };
}
