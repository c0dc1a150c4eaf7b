// Small charts: a shape to look at, and in words for who cannot.

import { s, setAttribute } from "./dom.js";

const POINTS = 90;
const FEWEST = 24;
const HEIGHT = 40;

/**
 * Layers drawn over one another, each `{ class, area }`, the newest point at the right edge. A young chart is drawn
 * wider, so that it can be read before it is full.
 * `update(series, label, top)`: an array of numbers for each layer; null is a gap. `top`: least height of the scale.
 */
export function chart(layers) {
  const paths = layers.map((layer) => s("path", { class: layer.class, "vector-effect": "non-scaling-stroke" }));
  const node = s("svg", { class: "chart", role: "img", preserveAspectRatio: "none" }, ...paths);
  const update = (series, label, top = 1) => {
    const highest = Math.max(top, ...series.flat().filter((value) => value !== null));
    const wide = Math.max(FEWEST, series[0].length);
    setAttribute(node, "viewBox", `0 0 ${wide - 1} ${HEIGHT}`);
    paths.forEach((path, i) => setAttribute(path, "d", outline(series[i], wide, highest, layers[i].area)));
    setAttribute(node, "aria-label", label);
  };
  return { node, update };
}

function outline(values, wide, highest, area) {
  const first = wide - values.length;
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
