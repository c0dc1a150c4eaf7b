// Elements out of data. Text only ever becomes text: nothing here, or anywhere in the console, parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const rowsOf = new WeakMap();

/** An element. `props`: attributes; `on` has listeners; null and false leave an attribute out. */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** The same, for SVG. */
export function s(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(node, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  for (const [event, listener] of Object.entries(on)) node.addEventListener(event, listener);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : String(value));
}

/** Changes an element's text only if it is another: screen readers and selections stay undisturbed. */
export function setText(node, text) {
  if (node.textContent !== String(text)) node.textContent = String(text);
}

/**
 * Keeps one child for each item, in order, and the focus where it is. `make(item)` returns `{ node, update(item) }`;
 * the last child of `parent` may be one marked `data-empty`, shown where there is nothing else.
 */
export function keyed(parent, items, keyOf, make) {
  const known = rowsOf.get(parent) ?? new Map();
  const rows = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const row = known.get(key) ?? make(item);
    row.update(item);
    rows.set(key, row);
    if (row.node === place) place = place.nextElementSibling;
    else parent.insertBefore(row.node, place);
  }
  for (const [key, row] of known) if (!rows.has(key)) row.node.remove();
  rowsOf.set(parent, rows);
  const empty = parent.querySelector(":scope > [data-empty]");
  if (empty) empty.hidden = rows.size > 0;
}

/** A button that asks once more: the first press arms it for a few seconds, the second does it. */
export function careful(label, sure, action, props = {}) {
  let timer = 0;
  const rest = () => {
    clearTimeout(timer);
    timer = 0;
    button.classList.remove("armed");
    setText(button, label);
  };
  const press = async () => {
    if (!timer) {
      button.classList.add("armed");
      setText(button, sure);
      timer = setTimeout(rest, 4000);
      return;
    }
    rest();
    await busy(button, action);
  };
  const button = h("button", { type: "button", ...props, on: { click: press, blur: rest } }, label);
  return button;
}

/** Runs an action with its button disabled meanwhile; failures are told as toasts. */
export async function busy(button, action) {
  button.disabled = true;
  try {
    await action();
  } catch (error) {
    toast(error.message, "bad");
  } finally {
    button.disabled = false;
  }
}

export function toast(message, kind = "good") {
  const note = h("p", { class: `toast ${kind}` }, message);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 8000 : 3500);
}
