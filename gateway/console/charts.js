// Line charts with axes, a goal line, and values under the pointer or the arrow keys.

import { h, s, setAttribute, setText } from "./dom.js";

const MARGIN = { left: 46, right: 8, top: 18, bottom: 20 };
const MINUTE = 60;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 240, 360].map((minutes) => minutes * MINUTE);
/** Pixels that the time below a tick needs, with room beside it. */
const TICK_WIDTH = 62;
const GAP_STEPS = 2.5;
/** A goal up to so many times the highest value is inside the scale; a higher one is only named. */
const GOAL_REACH = 4;

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const exactClock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/**
 * A chart of one or more layers, drawn over one another.
 *
 * `title`: what is drawn, for screen readers. `layers`: `{ name, class, area }`. `format(value)`: a value with its unit.
 * `update({ times, series, step, minutes, goal, least, names })`: Unix seconds; a list of values for each layer, null
 * where it was unknown; the expected distance of points in seconds; the width of the chart; a goal to draw, or null; the
 * least height of the scale; names in place of those of the layers.
 */
export function chart({ title, layers, format, height = 120 }) {
  const grid = s("g", { class: "grid" });
  const labels = s("g", { class: "ticks" });
  const paths = layers.map((layer) => s("path", { class: layer.class }));
  const goalLine = s("path", { class: "goal" });
  const goalText = s("text", { class: "goal-text", "text-anchor": "end" });
  const caption = s("text", { class: "caption", x: 0, y: 9 });
  const cursor = s("path", { class: "cursor" });
  const parts = [grid, labels, ...paths, goalLine, goalText, caption, cursor];
  const svg = s("svg", { class: "chart", role: "img", tabindex: "0", height }, ...parts);
  const hint = h("p", { class: "tip", hidden: true });
  const node = h("div", { class: "plot" }, svg, hint);
  let seen = null;
  /** The moment that is pointed at, in Unix seconds: its point keeps its value while the chart moves on. */
  let at = null;

  const draw = () => {
    const width = svg.clientWidth;
    if (!seen || !width) return;
    const scale = scaleOf(seen, width, height);
    setAttribute(svg, "viewBox", `0 0 ${width} ${height}`);
    drawAxes(grid, labels, scale, format);
    paths.forEach((path, i) => setAttribute(path, "d", outline(seen, seen.series[i], scale, layers[i].area)));
    drawGoal(goalLine, goalText, seen.goal, scale, format);
    setText(caption, named().map(([name, , layer]) => `${/dashed/.test(layer.class) ? "- -" : "—"} ${name}`).join("   "));
    point(scale);
  };
  /** `[name, values, layer]` of each layer that has a name. */
  const named = () => layers.map((layer, i) => [seen.names?.[i] ?? layer.name, seen.series[i], layer]).filter(([name]) => name);
  const told = (index) => named().map(([name, values]) => `${name} ${values[index] == null ? "unknown" : format(values[index])}`);
  const point = (scale) => {
    const index = at === null || at < scale.begin ? null : nearest(seen.times, at);
    hint.hidden = index === null;
    setAttribute(cursor, "d", index === null ? null : `M${scale.x(seen.times[index])} ${MARGIN.top}V${scale.bottom}`);
    if (index === null) return;
    setText(hint, `${exactClock.format(seen.times[index] * 1000)} · ${told(index).join(" · ")}`);
    const x = scale.x(seen.times[index]);
    hint.style.left = `${Math.min(Math.max(x, 70), Math.max(70, scale.width - 70))}px`;
  };
  const move = (index) => {
    at = index === null ? null : seen.times[index];
    draw();
  };
  svg.addEventListener("pointermove", (event) => {
    if (seen) move(nearest(seen.times, timeAt(seen, event.clientX - svg.getBoundingClientRect().left, svg.clientWidth)));
  });
  svg.addEventListener("pointerleave", () => move(null));
  svg.addEventListener("blur", () => move(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !seen?.times.length) return;
    event.preventDefault();
    const index = at === null ? seen.times.length : nearest(seen.times, at);
    move(Math.max(0, Math.min(seen.times.length - 1, index + step)));
  });
  new ResizeObserver(draw).observe(svg);
  const update = (points) => {
    seen = { ...points, end: Math.max(Date.now() / 1000, points.times.at(-1) ?? 0) };
    const words = told(points.times.length - 1).join(", ");
    setAttribute(svg, "aria-label", `${title}, last ${points.minutes} minutes. Now: ${words}.`);
    draw();
  };
  return { node, update };
}

function scaleOf({ series, goal, least = 1, minutes, end }, width, height) {
  const bottom = height - MARGIN.bottom;
  const known = series.flat().filter((value) => value !== null && value !== undefined);
  const highest = Math.max(least, ...known);
  const wanted = goal && goal <= highest * GOAL_REACH ? Math.max(highest, goal * 1.08) : highest;
  const ticks = ticksTo(wanted);
  const top = Math.max(wanted, ticks.at(-1));
  const begin = end - minutes * MINUTE;
  const inner = width - MARGIN.left - MARGIN.right;
  const x = (time) => Number((MARGIN.left + ((time - begin) / (end - begin)) * inner).toFixed(1));
  const y = (value) => Number((bottom - (value / top) * (bottom - MARGIN.top)).toFixed(1));
  return { x, y, top, ticks, begin, end, bottom, width };
}

/** Two to four round values from 0 up to about `highest`. */
function ticksTo(highest) {
  const rough = highest / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let value = 0; value <= highest * 1.0001; value += step) ticks.push(value);
  return ticks;
}

function drawAxes(grid, labels, scale, format) {
  const right = scale.width - MARGIN.right;
  const lines = scale.ticks.map((value) => s("path", { d: `M${MARGIN.left} ${scale.y(value)}H${right}` }));
  const values = scale.ticks.map((value) =>
    text(MARGIN.left - 7, scale.y(value) + 3.5, value === 0 ? "0" : format(value), "end"),
  );
  const span = scale.end - scale.begin;
  const step = TIME_STEPS.find((size) => span / size <= (right - MARGIN.left) / TICK_WIDTH) ?? TIME_STEPS.at(-1);
  const shift = new Date(scale.end * 1000).getTimezoneOffset() * MINUTE;
  const times = [];
  for (let time = Math.ceil((scale.begin - shift) / step) * step + shift; time <= scale.end; time += step) times.push(time);
  const moments = times
    .filter((time) => scale.x(time) > MARGIN.left + 14 && scale.x(time) < right - 12)
    .map((time) => text(scale.x(time), scale.bottom + 15, clock.format(time * 1000), "middle"));
  grid.replaceChildren(...lines);
  labels.replaceChildren(...values, ...moments);
}

function drawGoal(line, label, goal, scale, format) {
  const shown = goal !== null && goal !== undefined;
  const inside = shown && goal <= scale.top;
  setAttribute(line, "d", inside ? `M${MARGIN.left} ${scale.y(goal)}H${scale.width - MARGIN.right}` : null);
  setText(label, shown ? `goal ${format(goal)}${inside ? "" : " ↑"}` : "");
  setAttribute(label, "x", scale.width - MARGIN.right);
  setAttribute(label, "y", inside ? Math.max(scale.y(goal) - 4, 9) : 9);
}

const text = (x, y, words, anchor) => s("text", { x, y, "text-anchor": anchor }, words);

/** The points as an SVG path; a point that is unknown, or comes late, begins a new piece. */
function outline({ times, step }, values, scale, area) {
  const pieces = [];
  let piece = [];
  times.forEach((time, i) => {
    const value = values[i];
    const late = piece.length && time - times[i - 1] > GAP_STEPS * step;
    if (late || value === null || value === undefined) {
      if (piece.length) pieces.push(piece);
      piece = [];
    }
    if (value !== null && value !== undefined && time >= scale.begin) piece.push([scale.x(time), scale.y(value)]);
  });
  if (piece.length) pieces.push(piece);
  return pieces.map((points) => drawn(points, scale.bottom, area)).join("") || null;
}

function drawn(points, bottom, area) {
  const line = points.map(([x, y], i) => `${i ? "L" : "M"}${x} ${y}`).join("");
  if (area) return `${line}L${points.at(-1)[0]} ${bottom}L${points[0][0]} ${bottom}Z`;
  return points.length === 1 ? `${line}h.1` : line;
}

function timeAt(seen, x, width) {
  const share = (x - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
  return seen.end - seen.minutes * MINUTE * (1 - share);
}

/** The index of the point nearest to a time; null where there are no points. */
function nearest(times, time) {
  const distances = times.map((one) => Math.abs(one - time));
  return times.length ? distances.indexOf(Math.min(...distances)) : null;
}
