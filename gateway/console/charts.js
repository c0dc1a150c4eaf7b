// Small charts: a shape to look at, and in words for who cannot.

import { s, setAttribute } from "./dom.js";

export const POINTS = 90;
const HEIGHT = 40;

/**
 * Layers drawn over one another, each `{ class, area }`, the newest point at the right edge.
 * `update(series, label, top)`: an array of numbers for each layer; null is a gap. `top`: least height of the scale.
 */
export function chart(layers) {
  const paths = layers.map((layer) => s("path", { class: layer.class, "vector-effect": "non-scaling-stroke" }));
  const box = { viewBox: `0 0 ${POINTS - 1} ${HEIGHT}`, preserveAspectRatio: "none" };
  const node = s("svg", { class: "chart", role: "img", ...box }, ...paths);
  const update = (series, label, top = 1) => {
    const highest = Math.max(top, ...series.flat().filter((value) => value !== null));
    paths.forEach((path, i) => setAttribute(path, "d", outline(series[i], highest, layers[i].area)));
    setAttribute(node, "aria-label", label);
  };
  return { node, update };
}

function outline(values, highest, area) {
  const first = POINTS - values.length;
  const y = (value) => (HEIGHT - 1.5 - (value / highest) * (HEIGHT - 4)).toFixed(2);
  let drawn = "";
  let start = null;
  values.forEach((value, i) => {
    if (value !== null) {
      drawn += `${start === null ? "M" : "L"}${first + i} ${y(value)}`;
      start ??= first + i;
    }
    const ends = value === null || i === values.length - 1;
    if (ends && start !== null) {
      const last = value === null ? first + i - 1 : first + i;
      if (area) drawn += `L${last} ${HEIGHT}L${start} ${HEIGHT}Z`;
      start = null;
    }
  });
  return drawn;
}

/** Remembers the last points of a figure. */
export class History {
  #values = [];

  add(value) {
    this.#values.push(value);
    if (this.#values.length > POINTS) this.#values.shift();
  }

  get values() {
    return this.#values;
  }

  get last() {
    return this.#values.at(-1) ?? null;
  }
}
