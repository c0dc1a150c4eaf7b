// Requests: those that live, those that have ended, and those that failed; filtered and grouped.

import { admin } from "./api.js";
import { careful, h, keyed, setText, toast } from "./dom.js";
import { ago, count, latency, span } from "./format.js";

const KINDS = { live: "Live", all: "Recent", failed: "Failed" };
const GROUPS = { "": "no groups", tenant: "tenant", model: "model", lane: "lane" };
const EMPTY = {
  live: "Nothing is running.",
  all: "This gateway process has answered no request yet.",
  failed: "No request has failed at this gateway process.",
};

export function requestPanel(refresh) {
  let kind = "live";
  let live = { requests: [], total: 0 };
  let ended = [];
  const tabs = Object.entries(KINDS).map(([name, label]) =>
    h("button", { type: "button", class: "quiet", "aria-pressed": String(name === kind), on: { click: () => choose(name) } }, label),
  );
  const filter = h("input", { type: "search", placeholder: "Model, tenant, key, lane, code or id", "aria-label": "Filter requests" });
  const group = h("select", { "aria-label": "Group requests by" });
  group.append(...Object.entries(GROUPS).map(([value, label]) => h("option", { value }, value ? `by ${label}` : label)));
  const summary = h("span", { class: "muted" });
  const tables = { live: liveTable(refresh), ended: endedTable(), groups: groupTable() };
  const head = h("div", { class: "head" }, h("h2", {}, "Live requests"), summary, h("div", { class: "tabs" }, ...tabs), filter, group);
  const node = h("section", { class: "card", "aria-label": "Live requests" }, head, ...Object.values(tables).map((t) => t.node));

  const choose = async (name) => {
    kind = name;
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(Object.keys(KINDS)[i] === name)));
    setText(head.firstElementChild, `${KINDS[name]} requests`);
    await learn();
    draw();
  };
  const learn = async () => {
    if (kind !== "live") ended = (await admin("GET", `requests/recent?which=${kind}&limit=500`)).requests;
  };
  const draw = () => {
    const all = kind === "live" ? live.requests : ended;
    const found = all.filter((request) => matches(request, filter.value.trim().toLowerCase()));
    const shown = group.value ? "groups" : kind === "live" ? "live" : "ended";
    for (const [name, table] of Object.entries(tables)) table.node.hidden = name !== shown;
    tables[shown].update(found, group.value, found.length === all.length ? EMPTY[kind] : "No request is like that.");
    setText(summary, told(kind, all, found, live.total));
  };
  filter.addEventListener("input", draw);
  group.addEventListener("change", draw);
  const update = async (requests) => {
    live = requests;
    await learn();
    draw();
  };
  return { node, update };
}

function matches(request, words) {
  const fields = [request.model, request.tenant, request.key, request.lane, request.id, request.request_id, request.code ?? "", request.state ?? String(request.status)];
  return words.split(/\s+/).every((word) => fields.some((field) => field.toLowerCase().includes(word)));
}

function told(kind, all, found, total) {
  const filtered = found.length < all.length ? `${count(found.length)} of ` : "";
  if (kind !== "live") return all.length ? `${filtered}${count(all.length)}` : "";
  const listed = all.reduce((sum, request) => sum + request.answers, 0);
  if (total > listed) return `${filtered}${count(listed)} of ${count(total)} answers`;
  return total ? `${filtered}${count(all.length)}` : "";
}

function tableOf(name, titles) {
  const heads = titles.map((title) => h("th", { scope: "col" }, title || h("span", { class: "hidden" }, "Actions")));
  const words = h("td", { colspan: titles.length });
  const body = h("tbody", {}, h("tr", { "data-empty": true }, words));
  return { node: h("table", { class: name }, h("thead", {}, h("tr", {}, ...heads)), body), body, words, heads };
}

function liveTable(refresh) {
  const { node, body, words } = tableOf("requests", ["Request", "Tenant", "Lane", "Progress", "Age", ""]);
  const update = (requests, _, nothing) => {
    setText(words, nothing);
    keyed(body, requests, (request) => request.id, (request) => liveRow(request, refresh));
  };
  return { node, update };
}

function endedTable() {
  const { node, body, words } = tableOf("requests ended", ["Request", "Tenant", "Lane", "Answer", "First token", "Took", "Ended"]);
  const update = (requests, _, nothing) => {
    setText(words, nothing);
    keyed(body, requests, (request) => `${request.id} ${request.ended}`, endedRow);
  };
  return { node, update };
}

function groupTable() {
  const { node, body, words, heads } = tableOf("groups", ["", "Requests", "Running", "Waiting or failed", "Tokens"]);
  const update = (requests, name, nothing) => {
    setText(words, nothing);
    setText(heads[0], GROUPS[name]);
    const groups = [...Map.groupBy(requests, (request) => request[name] || "unknown")];
    groups.sort(([, a], [, b]) => b.length - a.length);
    keyed(body, groups, ([value]) => value, ([value]) => groupRow(value));
  };
  return { node, update };
}

function groupRow(value) {
  const cells = ["Requests", "Running", "Waiting or failed", "Tokens"].map((title) => h("td", { class: "number", "data-title": title }));
  const update = ([, requests]) => {
    const running = requests.filter((request) => request.state === "running").length;
    const rest = requests.filter((request) => request.state === "queued" || request.failed).length;
    const tokens = requests.reduce((sum, request) => sum + (request.generated_tokens ?? request.completion_tokens), 0);
    [requests.length, running, rest, tokens].forEach((number, i) => setText(cells[i], count(number)));
  };
  return { node: h("tr", {}, h("th", { scope: "row" }, value), ...cells), update };
}

const aboutRequest = (request, state) =>
  h("td", {}, h("b", {}, request.model || "no model"), " ", state, h("small", { title: request.request_id }, request.id.slice(0, 12)));
const aboutTenant = (request) =>
  h("td", { "data-title": "Tenant" }, request.tenant || "unknown", request.key ? h("small", {}, `key ${request.key}`) : null);
const aboutLane = ({ lane }) => h("td", { "data-title": "Lane" }, lane ? h("span", { class: `dot ${lane}` }) : null, lane || "none");

function liveRow(request, refresh) {
  const state = h("span", { class: "badge" });
  const progress = h("progress", { "aria-label": "Generated tokens" });
  const tokens = h("span", { class: "number" });
  const age = h("td", { class: "number", "data-title": "Age" });
  const stop = careful("Cancel", "Really cancel?", async () => {
    await admin("POST", `requests/${encodeURIComponent(request.id)}/cancel`);
    toast(`Cancelled ${request.id.slice(0, 8)}`);
    await refresh();
  }, { class: "quiet danger", "aria-label": `Cancel request ${request.id.slice(0, 8)}` });
  const cells = [aboutRequest(request, state), aboutTenant(request), aboutLane(request)];
  const node = h("tr", {}, ...cells, h("td", { "data-title": "Progress" }, progress, tokens), age, h("td", { class: "end" }, stop));
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

/** 499 is neither: its client left. */
const standing = (request) => (request.failed ? "failed" : request.status < 400 ? "answered" : "left");

function endedRow(request) {
  const state = h("span", { class: `badge ${standing(request)}` }, String(request.status));
  const answer = request.code || `${request.finish}, ${count(request.prompt_tokens)} + ${count(request.completion_tokens)} tokens`;
  const cell = (title, text) => h("td", { class: "number", "data-title": title }, text);
  const ended = cell("Ended", "");
  const node = h(
    "tr",
    {},
    aboutRequest(request, state),
    aboutTenant(request),
    aboutLane(request),
    h("td", { "data-title": "Answer" }, answer),
    cell("First token", latency(request.ttft_seconds)),
    cell("Took", latency(request.duration_seconds)),
    ended,
  );
  return { node, update: () => setText(ended, ago(request.ended)) };
}
