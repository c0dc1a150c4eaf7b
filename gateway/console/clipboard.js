// Copying to the clipboard, with a way out where the browser does not allow it (a page that is not served securely).

import { h, setText, toast } from "./dom.js";

const SAID_MS = 1500;

/** A quiet button that copies what `text()` returns. */
export function copied(label, text) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
      setText(button, "Copied");
      setTimeout(() => setText(button, label), SAID_MS);
    } catch {
      button.after(h("textarea", { class: "copy", readonly: true, rows: 3, "aria-label": label }, text()));
      toast("This browser does not let the page copy: the text is below, to be copied by hand.", "bad");
    }
  };
  const button = h("button", { type: "button", class: "quiet copy", on: { click: copy } }, label);
  return button;
}
