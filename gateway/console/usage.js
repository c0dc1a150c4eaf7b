// Usage and its cost: sums by tenant, key, adapter, lane or day, and the same as a CSV file.

import { admin, adminBlob } from "./api.js";
import { busy, h, setText, toast } from "./dom.js";
import { compact, count, percent } from "./format.js";

const GROUPS = { "tenant": "tenant", "adapter": "adapter", "lane": "lane", "day": "day", "tenant,adapter": "tenant and adapter", "tenant,key": "tenant and key", "tenant,lane": "tenant and lane" };
const SPANS = { 0: "today", 6: "last 7 days", 29: "last 30 days", 89: "last 90 days" };
const DAY_MS = 86_400_000;
const MOST_ROWS = 500;

export const usage = {
  sections: [],
  mount(content) {
    const group = h("select", { "aria-label": "Sum up by" }, ...Object.entries(GROUPS).map(([value, label]) => h("option", { value }, `by ${label}`)));
    const days = h("select", { "aria-label": "Days" }, ...Object.entries(SPANS).map(([value, label]) => h("option", { value, selected: value === "29" }, label)));
    const save = h("button", { type: "button", class: "quiet", on: { click: () => busy(save, () => download(group.value, days.value)) } }, "Save as CSV");
    const total = h("p", { class: "muted" });
    const head = h("thead");
    const body = h("tbody");
    const table = h("div", { class: "scroll" }, h("table", { class: "usage" }, head, body));
    const bar = h("div", { class: "head" }, h("h2", {}, "Usage"), h("div", { class: "actions" }, group, days, save));
    content.append(h("h1", {}, "Usage and cost"), h("section", { class: "card", "aria-label": "Usage" }, bar, total, table));
    let latest = 0;
    const learn = async () => {
      latest += 1;
      const mine = latest;
      try {
        const report = await admin("GET", `usage?${asked(group.value, days.value)}`);
        if (mine === latest) show(report, { head, body, total }); // an earlier question can be answered later
      } catch (error) {
        if (mine === latest) toast(error.message, "bad");
      }
    };
    group.addEventListener("change", learn);
    days.addEventListener("change", learn);
    learn();
    return { update: () => {} };
  },
};

function asked(group, days) {
  const day = (back) => new Date(Date.now() - back * DAY_MS).toISOString().slice(0, 10);
  return new URLSearchParams({ group_by: group, from: day(Number(days)), to: day(0) }).toString();
}

async function download(group, days) {
  const url = URL.createObjectURL(await adminBlob(`usage?${asked(group, days)}&format=csv`));
  h("a", { href: url, download: "usage.csv" }).click();
  URL.revokeObjectURL(url);
}

function show(report, { head, body, total }) {
  const priced = report.total.amount !== null || report.total.cost !== null;
  const money = (value) => (value === null ? "–" : `${Number(value).toFixed(4)} ${report.currency}`);
  const titles = [...report.group_by, "Requests", "Prompt tokens", "Cached", "Completion tokens", "Device time", "Share", ...(priced ? ["Sold for", "Cost"] : [])];
  const all = Math.max(1, report.total.prompt_tokens + report.total.completion_tokens);
  const tokensOf = (line) => line.prompt_tokens + line.completion_tokens;
  const lines = [...report.usage];
  if (!report.group_by.includes("day")) lines.sort((a, b) => tokensOf(b) - tokensOf(a));
  head.replaceChildren(h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title))));
  body.replaceChildren(...lines.slice(0, MOST_ROWS).map((line) => {
    const figures = [count(line.requests), compact(line.prompt_tokens), compact(line.cached_tokens), compact(line.completion_tokens), `${line.device_seconds.toFixed(1)} s`, percent(tokensOf(line) / all)];
    const worth = priced ? [money(line.amount), money(line.cost)] : [];
    const names = report.group_by.map((name) => h("td", {}, line[name] || (name === "adapter" ? "base model" : "unknown")));
    return h("tr", {}, ...names, ...[...figures, ...worth].map((figure) => h("td", { class: "number" }, figure)));
  }));
  const sold = priced ? ` · sold for ${money(report.total.amount)} · cost ${money(report.total.cost)}` : " · no prices are configured (section billing)";
  const cut = lines.length > MOST_ROWS ? ` · the first ${MOST_ROWS} of ${count(lines.length)} lines, all of them in the CSV file` : "";
  setText(total, `${count(report.total.requests)} requests · ${compact(tokensOf(report.total))} tokens${sold}${cut}`);
}
