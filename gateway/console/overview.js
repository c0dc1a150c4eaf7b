// Lanes, the pool of pages, and live requests.

import { admin } from "./api.js";
import { History, chart } from "./charts.js";
import { busy, careful, h, keyed, setText, toast } from "./dom.js";
import { compact, count, latency, percent, span } from "./format.js";

/** What charts are drawn from: it goes on while other views are looked at. */
export class Pulse {
  tokens = new History();
  lanes = new Map();
  #before = null;

  take({ engine, lanes }) {
    const now = performance.now() / 1000;
    const before = this.#before;
    const made = before && engine.generated_tokens - before.tokens;
    this.tokens.add(before && made >= 0 ? made / (now - before.at) : null);
    this.#before = { tokens: engine.generated_tokens, at: now };
    for (const lane of lanes) {
      const kept = this.lane(lane.lane);
      kept.running.add(lane.running);
      kept.depth.add(lane.running + lane.waiting);
      kept.ttft.add(lane.ttft_seconds.p95);
      kept.itl.add(lane.itl_seconds.p95);
    }
  }

  lane(name) {
    const fresh = () => ({ running: new History(), depth: new History(), ttft: new History(), itl: new History() });
    if (!this.lanes.has(name)) this.lanes.set(name, fresh());
    return this.lanes.get(name);
  }
}

export const overview = {
  sections: ["requests"],
  mount(content, { pulse, refresh }) {
    const machine = machinePanel();
    const lanes = h("div", { class: "lanes" });
    const requests = requestPanel(refresh);
    content.append(h("h1", { class: "hidden" }, "Overview"), machine.node, lanes, requests.node);
    return {
      update(seen) {
        machine.update(seen.engine, pulse);
        keyed(lanes, seen.lanes, (lane) => lane.lane, (lane) => laneCard(lane, pulse.lane(lane.lane), refresh));
        requests.update(seen.requests);
      },
    };
  },
};

function machinePanel() {
  const rate = h("strong", { class: "figure" }, "–");
  const trend = chart([{ class: "area accent", area: true }, { class: "line accent" }]);
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
  const update = (engine, pulse) => {
    const last = pulse.tokens.last;
    setText(rate, last === null ? "–" : compact(last));
    const values = pulse.tokens.values;
    trend.update([values, values], `Tokens a second, now ${last === null ? "unknown" : Math.round(last)}`, 10);
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

function laneCard(first, history, refresh) {
  const name = first.lane;
  const mode = h("span", { class: "badge" });
  const buttons = ["pause", "drain", "resume"].map((action) => {
    const label = action[0].toUpperCase() + action.slice(1);
    const act = async () => {
      await admin("POST", `lanes/${name}/${action}`);
      toast(`${name} is ${{ pause: "paused", drain: "draining", resume: "open" }[action]}`);
      await refresh();
    };
    const press = () => busy(button, act);
    const button =
      action === "resume"
        ? h("button", { type: "button", on: { click: press } }, label)
        : careful(label, `${label} ${name}?`, act, { class: "quiet" });
    return { action, button };
  });
  const figures = Object.fromEntries(["running", "waiting", "oldest"].map((key) => [key, h("strong", {}, "–")]));
  const depth = chart([{ class: "area depth", area: true }, { class: "area running", area: true }, { class: "line" }]);
  const times = ["ttft", "itl"].map((key) => timeRow(key, history[key]));
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
    h("div", { class: "times" }, ...times.map((row) => row.node)),
    h("p", { class: "fine" }, preempted),
  );
  const update = (lane) => {
    node.dataset.mode = lane.mode;
    setText(mode, lane.mode);
    for (const { action, button } of buttons) button.hidden = (action === "resume") === (lane.mode === "open");
    setText(figures.running, count(lane.running));
    setText(figures.waiting, count(lane.waiting));
    setText(figures.oldest, lane.waiting ? span(lane.oldest_wait_seconds) : "–");
    const { depth: all, running } = history;
    depth.update([all.values, running.values, all.values], `${lane.running} running, ${lane.waiting} waiting`, 4);
    times[0].update(lane.ttft_seconds, lane.slo_ttft_attainment);
    times[1].update(lane.itl_seconds, lane.slo_itl_attainment);
    const seen = `Percentiles of the last ${span(lane.window_seconds)}.`;
    setText(preempted, `${count(lane.preemptions)} preempted since the engine started. ${seen}`);
  };
  return { node, update };
}

function timeRow(key, history) {
  const title = { ttft: "First token", itl: "Between tokens" }[key];
  const values = ["p50", "p95", "p99"].map((name) => ({ name, value: h("dd", {}, "–") }));
  const trend = chart([{ class: "line" }]);
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
  const update = (seconds, attainment) => {
    for (const { name, value } of values) setText(value, latency(seconds[name]));
    trend.update([history.values], `${title}, 95th percentile, now ${latency(seconds.p95)}`, 0.001);
    met.className = `use ${attainment < 0.9 ? "poor" : attainment < 0.97 ? "fair" : "good"}`;
    met.setAttribute("aria-valuenow", attainment);
    met.firstElementChild.style.width = `${attainment * 100}%`;
    setText(share, `${percent(attainment)} in time`);
  };
  return { node, update };
}

function requestPanel(refresh) {
  const titles = ["Request", "Tenant", "Lane", "Progress", "Age", ""];
  const body = h("tbody", {}, h("tr", { "data-empty": true }, h("td", { colspan: titles.length }, "Nothing is running.")));
  const summary = h("span", { class: "muted" });
  const heads = titles.map((title) => h("th", { scope: "col" }, title || h("span", { class: "hidden" }, "Actions")));
  const table = h("table", { class: "requests" }, h("thead", {}, h("tr", {}, ...heads)), body);
  const head = h("div", { class: "head" }, h("h2", {}, "Live requests"), summary);
  const node = h("section", { class: "card", "aria-label": "Live requests" }, head, table);
  const update = ({ requests, total }) => {
    keyed(body, requests, (request) => request.id, (request) => requestRow(request, refresh));
    const listed = requests.reduce((sum, request) => sum + request.answers, 0);
    setText(summary, total > listed ? `${count(listed)} of ${count(total)} answers` : total ? `${count(total)}` : "");
  };
  return { node, update };
}

function requestRow(request, refresh) {
  const state = h("span", { class: "badge" });
  const progress = h("progress", { "aria-label": "Generated tokens" });
  const tokens = h("span", { class: "number" });
  const age = h("td", { class: "number", "data-title": "Age" });
  const stop = careful("Cancel", "Really cancel?", async () => {
    await admin("POST", `requests/${encodeURIComponent(request.id)}/cancel`);
    toast(`Cancelled ${request.id.slice(0, 8)}`);
    await refresh();
  }, { class: "quiet danger", "aria-label": `Cancel request ${request.id.slice(0, 8)}` });
  const node = h(
    "tr",
    {},
    h("td", {}, h("b", {}, request.model), " ", state, h("small", { title: request.request_id }, request.id.slice(0, 12))),
    h("td", { "data-title": "Tenant" }, request.tenant, h("small", {}, `key ${request.key}`)),
    h("td", { "data-title": "Lane" }, h("span", { class: `dot ${request.lane}` }), request.lane),
    h("td", { "data-title": "Progress" }, progress, tokens),
    age,
    h("td", { class: "end" }, stop),
  );
  const update = (now) => {
    setText(state, now.state);
    state.className = `badge ${now.state}`;
    progress.max = now.max_tokens;
    progress.value = now.generated_tokens;
    setText(tokens, `${count(now.generated_tokens)} of ${count(now.max_tokens)}`);
    setText(age, span(now.age_seconds));
  };
  return { node, update };
}
