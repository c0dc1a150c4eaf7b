// The base model whose engine, lanes and requests are shown: until one is chosen, the first whose engine answers.

import { h } from "./dom.js";

const select = document.getElementById("base-model");
let chosen = "";
let shown = "";

const named = (model) => (model ? `&model=${encodeURIComponent(model)}` : "");

/** A query's part that names the chosen model: empty, or with `&` before it. */
export const ofModel = () => named(chosen);

/** A query's part that names the model that was shown last. */
export const ofShownModel = () => named(chosen || shown);

/** Calls `listener` whenever another model is chosen. */
export const onModel = (listener) => select.addEventListener("change", listener);

/** Offers the models that the gateway has, of which `model` is shown; there is nothing to choose from one. */
export function offerModels(names, model) {
  shown = model;
  select.hidden = names.length < 2;
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") !== names.join("\n")) select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (!chosen) select.value = model;
}

select.addEventListener("change", () => {
  chosen = select.value;
});
