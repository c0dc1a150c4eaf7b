// The playground: a chat as a tenant has it, with a tenant's key. The administrator's key is refused here, so that
// every request counts for the tenant that made it, and the limits of that tenant apply.

import { fetchWith, isAdminKey } from "./api.js";
import { copied } from "./clipboard.js";
import { h, setText } from "./dom.js";
import { count, latency } from "./format.js";
import { markdown } from "./markdown.js";

const LANES = { "": "the tenant’s default", priority: "interactive", flex: "batch" };
let tenantKey = "";

export const playground = {
  sections: [],
  mount(content) {
    const chat = new Chat();
    content.append(h("h1", {}, "Playground"), h("div", { class: "playground" }, chat.settings, chat.talk));
    if (tenantKey) chat.models();
    return { update: () => {}, leave: () => chat.stop() };
  },
};

class Chat {
  #messages = [];
  #running = null;

  constructor() {
    this.key = h("input", { id: "tenant-key", type: "password", autocomplete: "off", spellcheck: "false", value: tenantKey });
    this.model = h("select", { id: "model", disabled: true });
    this.lane = h("select", { id: "lane" }, ...Object.entries(LANES).map(([tier, name]) => h("option", { value: tier }, name)));
    this.system = h("textarea", { id: "system", rows: 3, placeholder: "You are …" });
    this.most = h("input", { id: "most", type: "number", min: 1, step: 1, value: 256 });
    this.heat = h("input", { id: "heat", type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
    this.trouble = h("p", { class: "error", role: "alert" });
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.input = h("textarea", { id: "message", rows: 2, placeholder: "Say something", "aria-label": "Message" });
    this.send = h("button", { class: "primary", type: "submit", disabled: true }, "Send");
    this.clear = h("button", { class: "quiet", type: "button", on: { click: () => this.forget() } }, "Clear");
    this.key.addEventListener("change", () => this.models());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
    this.settings = this.#settings();
    this.form = h("form", { class: "say", on: { submit: (event) => this.#submit(event) } }, this.input, this.send, this.clear);
    this.talk = h("section", { class: "card talk", "aria-label": "Chat" }, this.log, this.form);
    this.#hint();
  }

  #settings() {
    const field = (label, input) => h("label", { for: input.id }, label, input);
    return h(
      "form",
      { class: "card settings", "aria-label": "Settings", on: { submit: (event) => event.preventDefault() } },
      field("Tenant key", this.key),
      h("p", { class: "fine" }, "Requests are that tenant’s: its limits count them. Forgotten when you leave the page."),
      this.trouble,
      field("Model", this.model),
      field("Lane", this.lane),
      h("div", { class: "pair" }, field("Most tokens", this.most), field("Temperature", this.heat)),
      field("System prompt", this.system),
    );
  }

  #hint() {
    this.log.replaceChildren(h("p", { class: "muted hint" }, "Type a tenant’s key, choose a model, say something."));
  }

  /** What the key may name. */
  async models() {
    tenantKey = this.key.value.trim();
    setText(this.trouble, "");
    this.model.replaceChildren();
    this.model.disabled = this.send.disabled = true;
    if (!tenantKey) return;
    if (isAdminKey(tenantKey)) {
      tenantKey = this.key.value = "";
      setText(this.trouble, "That is the administrator’s key. Give a tenant’s: loralane keys create TENANT makes one.");
      return;
    }
    try {
      const { data } = await (await fetchWith(tenantKey, "GET", "v1/models")).json();
      this.model.append(...data.map(({ id }) => h("option", { value: id }, id)));
      this.model.disabled = this.send.disabled = false;
      this.input.focus();
    } catch (error) {
      setText(this.trouble, error.message);
    }
  }

  async #submit(event) {
    event.preventDefault();
    if (this.#running) {
      this.stop();
      return;
    }
    const text = this.input.value.trim();
    if (!text || this.send.disabled) return;
    this.log.querySelector(".hint")?.remove();
    this.input.value = "";
    this.#messages.push({ role: "user", content: text });
    this.log.append(h("p", { class: "said user" }, text));
    await this.#answer();
    this.input.focus();
  }

  async #answer() {
    const words = h("div", { class: "said assistant waiting" });
    const facts = h("p", { class: "facts", role: "status" });
    this.log.append(words, facts);
    this.#scroll(true);
    this.#running = new AbortController();
    setText(this.send, "Stop");
    const body = this.#body();
    try {
      const answer = await this.#stream(body, words, facts, this.#running.signal);
      this.#messages.push({ role: "assistant", content: answer });
    } catch (error) {
      const stopped = error.name === "AbortError";
      facts.append(h("span", { class: stopped ? "muted" : "error" }, stopped ? "stopped" : error.message));
      if (words.textContent) this.#messages.push({ role: "assistant", content: words.textContent });
      else this.#messages.pop();
    } finally {
      facts.append(" ", copied("Copy as curl", () => curl(body)));
      words.classList.remove("waiting");
      if (!words.childElementCount) words.replaceChildren(...markdown(words.textContent));
      words.classList.add("formatted");
      this.#running = null;
      setText(this.send, "Send");
      this.#scroll(false);
    }
  }

  async #stream(body, words, facts, signal) {
    const begun = performance.now();
    let first = null;
    let usage = null;
    const response = await fetchWith(tenantKey, "POST", "v1/chat/completions", body, signal);
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices[0]?.delta?.content;
      if (piece) {
        first ??= performance.now();
        words.append(piece);
        this.#scroll(false);
      }
      usage = chunk.usage ?? usage;
    }
    const lane = response.headers.get("x-loralane-lane");
    setText(facts, story(lane, begun, first, usage));
    return words.textContent;
  }

  #body() {
    const system = this.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages];
    const tier = this.lane.value ? { service_tier: this.lane.value } : {};
    return {
      model: this.model.value,
      messages,
      max_tokens: Number(this.most.value) || 256,
      temperature: Number(this.heat.value),
      stream: true,
      stream_options: { include_usage: true },
      ...tier,
    };
  }

  stop() {
    this.#running?.abort();
  }

  forget() {
    this.stop();
    this.#messages = [];
    this.#hint();
  }

  /** Scrolls to the newest words, unless the reader has scrolled up. */
  #scroll(always) {
    const { log } = this;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}

/** A command that repeats a request. The key stays out of it: commands end up in histories and chats. */
function curl(body) {
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const address = new URL("v1/chat/completions", document.baseURI).href;
  return `curl -N '${address}' -H "authorization: Bearer $LORALANE_API_KEY" -H 'content-type: application/json' -d '${quoted}'`;
}

function story(lane, begun, first, usage) {
  const parts = [`${lane} lane`];
  if (first !== null) parts.push(`first token ${latency((first - begun) / 1000)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${count(usage.prompt_tokens)} prompt${cached ? ` (${count(cached)} cached)` : ""}`);
    parts.push(`${count(usage.completion_tokens)} generated`);
    const seconds = (performance.now() - (first ?? begun)) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0.05) parts.push(`${Math.round((usage.completion_tokens - 1) / seconds)} tokens/s`);
  }
  return parts.join(" · ");
}

/** Data of server-sent events, until [DONE]. */
async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunksOf(body)) {
    const lines = (rest + decoder.decode(bytes, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

/** Iterates over a body; not every browser can do that by itself. */
async function* chunksOf(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.releaseLock();
  }
}
