// Markdown as models write it, as elements. Every text becomes a text node, so nothing in an answer can become markup;
// links are shown with their addresses and do not lead anywhere.

import { h } from "./dom.js";

const FENCE = /^\s*```(\S*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*\d+[.)]\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|(\[[^\]\n]+\]\([^)\s]+\))/;

/** A list of elements. Unknown syntax stays as it was typed. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const take = (pattern) => {
    const found = [];
    for (let match; at < lines.length && (match = pattern.exec(lines[at])); at += 1) found.push(match[1]);
    return found;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (FENCE.test(line)) blocks.push(fenced());
    else if (RULE.test(line)) blocks.push(rule());
    else if (HEADING.test(line)) blocks.push(heading(lines[at++]));
    else if (BULLET.test(line)) blocks.push(h("ul", {}, ...take(BULLET).map((item) => h("li", {}, ...inline(item)))));
    else if (NUMBER.test(line)) blocks.push(h("ol", {}, ...take(NUMBER).map((item) => h("li", {}, ...inline(item)))));
    else if (QUOTE.test(line)) blocks.push(h("blockquote", {}, ...inline(take(QUOTE).join("\n"))));
    else if (line.trim() === "") at += 1;
    else blocks.push(paragraph());
  }
  return blocks;

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

  function paragraph() {
    const words = [];
    const others = [FENCE, HEADING, BULLET, NUMBER, QUOTE, RULE];
    do words.push(lines[at++]);
    while (at < lines.length && lines[at].trim() && !others.some((other) => other.test(lines[at])));
    return h("p", {}, ...inline(words.join("\n")));
  }
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
