// The base model whose engine, lanes and requests are shown: the first, until another is chosen.

import { h } from "./dom.js";

const select = document.getElementById("base-model");
const listeners = new Set();
let chosen = "";

/** A query's part that names the chosen model: empty, or with `&` before it. */
export const ofModel = () => (chosen ? `&model=${encodeURIComponent(chosen)}` : "");

/** Calls `listener` whenever another model is chosen. */
export const onModel = (listener) => listeners.add(listener);

/** Offers the models that the gateway has; there is nothing to choose from one. */
export function offerModels(names) {
  select.hidden = names.length < 2;
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
}

select.addEventListener("change", () => {
  chosen = select.value;
  for (const listener of listeners) listener();
});
