// Markdown as models write it, as elements. Every text becomes a text node, so nothing in an answer can become markup;
// links are shown with their addresses and do not lead anywhere.

import { h } from "./dom.js";

const FENCE = /^\s*```(\S*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
/** The line below a table's head: `|---|:--:|`. */
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|(\[[^\]\n]+\]\([^)\s]+\))/;
/** An item that is indented by this many columns more than the one before it belongs to that one. */
const DEEPER = 2;

/** A list of elements. Unknown syntax stays as it was typed. */
export function markdown(text) {
  const lines = text.replaceAll("\t", "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") at += 1;
    else blocks.push((blockAt() ?? paragraph)());
  }
  return blocks;

  /** What reads the block that begins at this line; undefined for a paragraph. */
  function blockAt() {
    const line = lines[at];
    if (FENCE.test(line)) return fenced;
    if (RULE.test(line)) return rule;
    if (HEADING.test(line)) return () => heading(lines[at++]);
    if (itemOf(line)) return list;
    if (QUOTE.test(line)) return quote;
    return line.includes("|") && lines[at + 1]?.includes("|") && DELIMITERS.test(lines[at + 1]) ? table : undefined;
  }

  /** A block of code; one that is still being written ends with the text. */
  function fenced() {
    const code = [];
    for (at += 1; at < lines.length && !FENCE.test(lines[at]); at += 1) code.push(lines[at]);
    at += 1;
    return h("pre", {}, h("code", {}, code.join("\n")));
  }

  function rule() {
    at += 1;
    return h("hr");
  }

  function quote() {
    const words = [];
    for (let match; at < lines.length && (match = QUOTE.exec(lines[at])); at += 1) words.push(match[1]);
    return h("blockquote", {}, ...inline(words.join("\n")));
  }

  function paragraph() {
    const words = [];
    do words.push(lines[at++]);
    while (at < lines.length && lines[at].trim() && !blockAt());
    return h("p", {}, ...inline(words.join("\n")));
  }

  /** Items of one depth; those that are deeper make a list inside the item before them. */
  function list() {
    const { depth, number } = itemOf(lines[at]);
    const node = h(number === null ? "ul" : "ol", { start: number > 1 ? number : null });
    for (let item; (item = nextItem()) && item.depth > depth - DEEPER; ) {
      if (item.depth >= depth + DEEPER) node.lastChild.append(list());
      else if ((item.number === null) !== (number === null)) break;
      else node.append(h("li", {}, ...inline(itemText(item))));
    }
    return node;
  }

  /** The item at this line or, where nothing but blank lines is in between, behind it. */
  function nextItem() {
    let next = at;
    while (next < lines.length && !lines[next].trim()) next += 1;
    const item = next < lines.length ? itemOf(lines[next]) : null;
    if (item) at = next;
    return item;
  }

  /** An item's text, with the lines that go on with it. */
  function itemText(item) {
    const words = [item.text];
    for (at += 1; at < lines.length && /^\s+\S/.test(lines[at]) && !blockAt(); at += 1) words.push(lines[at].trim());
    return words.join("\n");
  }

  function table() {
    const titles = cellsOf(lines[at]);
    const sides = cellsOf(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
    const row = (tag, cells) => h("tr", {}, ...titles.map((_, i) => aligned(h(tag, {}, ...inline(cells[i] ?? "")), sides[i])));
    const head = row("th", titles);
    const rows = [];
    for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) rows.push(row("td", cellsOf(lines[at])));
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
  }
}

function itemOf(line) {
  const match = RULE.test(line) ? null : ITEM.exec(line);
  return match && { depth: match[1].length, number: match[2] === undefined ? null : Number(match[2]), text: match[3] };
}

/** The cells of a table's row; `\|` is a bar inside a cell. */
function cellsOf(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}

function aligned(cell, side) {
  cell.style.textAlign = side ?? "left";
  return cell;
}

function heading(line) {
  const [, marks, words] = HEADING.exec(line);
  return h("p", { class: `heading h${marks.length}`, role: "heading", "aria-level": String(marks.length + 2) }, ...inline(words));
}

/** Code, bold, italics and links inside a line. */
function inline(text) {
  const parts = [];
  let rest = text;
  for (let match; (match = INLINE.exec(rest)); rest = rest.slice(match.index + match[0].length)) {
    if (match.index) parts.push(rest.slice(0, match.index));
    parts.push(marked(match));
  }
  if (rest) parts.push(rest);
  return parts;
}

function marked([all, code, bold, italic]) {
  if (code) return h("code", {}, code.slice(1, -1));
  if (bold) return h("b", {}, ...inline(bold.slice(2, -2)));
  if (italic) return h("i", {}, ...inline(italic.slice(1, -1)));
  const [, words, address] = /^\[(.+)\]\((.+)\)$/.exec(all);
  return h("span", { class: "link" }, words === address ? words : `${words} (${address})`);
}
