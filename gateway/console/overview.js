// Lanes, the pool of pages, and requests.

import { admin } from "./api.js";
import { chart } from "./charts.js";
import { busy, careful, h, keyed, setText, toast } from "./dom.js";
import { axisTime, compact, count, latency, percent, span } from "./format.js";
import { Feed, SPANS } from "./history.js";
import { requestPanel } from "./requests.js";

/** The percentile that the gateway keeps for the chart of a lane that promises none. */
const UNPROMISED = 0.95;
const feed = new Feed();

export const overview = {
  sections: ["requests"],
  mount(content, { refresh }) {
    const machine = machinePanel();
    const lanes = h("div", { class: "lanes" });
    const requests = requestPanel(refresh);
    const range = rangeSelect(refresh);
    content.append(h("div", { class: "top" }, h("h1", { class: "hidden" }, "Overview"), range), machine.node, lanes, requests.node);
    return {
      async update(seen) {
        await feed.refresh();
        machine.update(seen.engine);
        keyed(lanes, ofOneModel(seen), (lane) => `${lane.model} ${lane.lane}`, (lane) => laneCard(lane, refresh));
        await requests.update(seen.requests);
      },
    };
  },
};

/** The lanes of the base model whose engine is shown. */
const ofOneModel = (seen) => seen.lanes.filter((lane) => lane.model === seen.engine.served_name);

function rangeSelect(refresh) {
  const options = Object.entries(SPANS).map(([minutes, label]) =>
    h("option", { value: minutes, selected: Number(minutes) === feed.minutes }, `last ${label}`),
  );
  const choose = () => {
    feed.choose(Number(select.value));
    refresh();
  };
  const select = h("select", { "aria-label": "Time range of the charts", on: { change: choose } }, ...options);
  return select;
}

function machinePanel() {
  const rate = h("strong", { class: "figure" }, "–");
  const layers = [{ class: "area accent", area: true }, { name: "generated", class: "line accent" }];
  const trend = chart({ title: "Generated tokens a second", layers, format: (value) => compact(value), height: 110 });
  const parts = ["kv", "cached", "adapter", "free"].map((name) => ({ name, bar: h("span", { class: `part ${name}` }) }));
  const bar = h("div", { class: "pool", role: "img" }, ...parts.map((part) => part.bar));
  const legend = h("ul", { class: "legend" });
  const node = h(
    "section",
    { class: "card machine", "aria-label": "Machine" },
    h("div", { class: "speed" }, h("div", {}, h("h2", {}, "Tokens a second"), rate), trend.node),
    h("div", {}, h("h2", {}, "Pages"), bar, legend),
  );
  const words = { kv: "in use", cached: "cached prefixes", adapter: "adapters", free: "free" };
  parts.forEach((part) => {
    part.share = h("b", {}, "–");
    legend.append(h("li", { class: part.name }, part.share, ` ${words[part.name]}`));
  });
  const update = (engine) => {
    const now = engine.tokens_per_second;
    setText(rate, now === null ? "–" : compact(Math.round(now)));
    trend.update(feed.of(["tokens_per_second", "tokens_per_second"], { least: 10 }));
    const total = Math.max(1, engine.total_pages);
    for (const part of parts) {
      const pages = engine[`${part.name}_pages`];
      part.bar.style.flexGrow = String(pages);
      setText(part.share, percent(pages / total));
    }
    const said = parts.map((part) => `${percent(engine[`${part.name}_pages`] / total)} ${words[part.name]}`);
    bar.setAttribute("aria-label", `${count(total)} pages: ${said.join(", ")}`);
  };
  return { node, update };
}

function laneCard(first, refresh) {
  const name = first.lane;
  const mode = h("span", { class: "badge" });
  const buttons = ["pause", "drain", "resume"].map((action) => modeButton(first, action, refresh));
  const figures = Object.fromEntries(["running", "waiting", "oldest"].map((key) => [key, h("strong", {}, "–")]));
  const layers = [{ class: "area running", area: true }, { name: "running", class: "line" }, { name: "waiting", class: "line dashed" }];
  const depth = chart({ title: `Requests of the ${name} lane`, layers, format: (value) => compact(Math.round(value * 10) / 10), height: 110 });
  const times = { ttft: timeRow(name, "ttft"), itl: timeRow(name, "itl") };
  const preempted = h("span", {}, "0");
  const node = h(
    "section",
    { class: `card lane ${name}`, "aria-label": `Lane ${name}` },
    h("div", { class: "head" }, h("h2", {}, name), mode, h("span", { class: "actions" }, ...buttons.map((b) => b.button))),
    h(
      "dl",
      { class: "figures" },
      h("div", {}, h("dt", {}, "running"), h("dd", {}, figures.running)),
      h("div", {}, h("dt", {}, "waiting"), h("dd", {}, figures.waiting)),
      h("div", {}, h("dt", {}, "oldest wait"), h("dd", {}, figures.oldest)),
    ),
    depth.node,
    h("div", { class: "times" }, times.ttft.node, times.itl.node),
    h("p", { class: "fine" }, preempted),
  );
  const update = (lane) => {
    node.dataset.mode = lane.mode;
    setText(mode, lane.mode);
    for (const { action, button } of buttons) button.hidden = (action === "resume") === (lane.mode === "open");
    setText(figures.running, count(lane.running));
    setText(figures.waiting, count(lane.waiting));
    setText(figures.oldest, lane.waiting ? span(lane.oldest_wait_seconds) : "–");
    const [running, waiting] = [`${name}.running`, `${name}.waiting`];
    depth.update(feed.of([running, running, waiting], { least: 4 }));
    times.ttft.update(lane.ttft_seconds, lane.slo_ttft_attainment, lane.ttft_goal_seconds, lane.attainment_goal);
    times.itl.update(lane.itl_seconds, lane.slo_itl_attainment, lane.itl_goal_seconds, lane.attainment_goal);
    const seen = `Percentiles of the last ${span(lane.window_seconds)}.`;
    setText(preempted, `${count(lane.preemptions)} preempted since the engine started. ${seen}`);
  };
  return { node, update };
}

function modeButton({ lane, model }, action, refresh) {
  const label = action[0].toUpperCase() + action.slice(1);
  const act = async () => {
    await admin("POST", `lanes/${lane}/${action}?model=${encodeURIComponent(model)}`);
    toast(`${lane} is ${{ pause: "paused", drain: "draining", resume: "open" }[action]}`);
    await refresh();
  };
  const press = () => busy(button, act);
  const button =
    action === "resume"
      ? h("button", { type: "button", on: { click: press } }, label)
      : careful(label, `${label} ${lane}?`, act, { class: "quiet" });
  return { action, button };
}

function timeRow(lane, key) {
  const title = { ttft: "First token", itl: "Between tokens" }[key];
  const values = ["p50", "p95", "p99"].map((name) => ({ name, value: h("dd", {}, "–") }));
  const trend = chart({ title: `${title}, ${lane} lane`, layers: [{ name: "", class: "line" }], format: axisTime, height: 96 });
  const share = h("b", {}, "–");
  const range = { "aria-valuemin": 0, "aria-valuemax": 1 };
  const met = h("span", { class: "use", role: "meter", "aria-label": `${title} in time`, ...range }, h("span"));
  const node = h(
    "div",
    { class: "time" },
    h("h3", {}, title),
    h("dl", {}, ...values.map(({ name, value }) => h("div", {}, h("dt", {}, name), value))),
    trend.node,
    h("p", { class: "met" }, met, share),
  );
  const update = (seconds, attainment, goal, promised) => {
    for (const { name, value } of values) setText(value, latency(seconds[name]));
    const drawn = `p${Number(((promised || UNPROMISED) * 100).toPrecision(5))}`;
    trend.update(feed.of([`${lane}.${key}_at_goal`], { goal, least: 0.001, names: [drawn] }));
    met.className = `use ${standing(attainment, promised)}`;
    met.setAttribute("aria-valuenow", attainment);
    met.firstElementChild.style.width = `${attainment * 100}%`;
    setText(share, `${percent(attainment)} in time${promised > 0 ? `, ${percent(promised)} promised` : ""}`);
  };
  return { node, update };
}

/** How a share of tokens in time stands to what the lane promises: twice as many late ones as it allows are poor. */
function standing(attainment, promised) {
  if (attainment >= promised) return "good";
  return attainment >= promised - (1 - promised) ? "fair" : "poor";
}
