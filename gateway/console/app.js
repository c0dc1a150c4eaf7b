// The console: one key, its views, and one question to the gateway every two seconds while the page is visible.

import { Refusal, admin, fetchWith, isSignedIn, signIn, signOut } from "./api.js";
import { adapters } from "./adapters.js";
import { setText, toast } from "./dom.js";
import { batches } from "./batches.js";
import { ofModel, offerModels, onModel } from "./models.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { tenants } from "./tenants.js";
import { usage } from "./usage.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 15_000;
const VIEWS = { overview, tenants, adapters, batches, usage, playground };

const element = (id) => document.getElementById(id);
let shown = null;
let timer = 0;
let failures = 0;
let turn = 0;

function show() {
  const inside = isSignedIn();
  element("door").hidden = inside;
  element("house").hidden = !inside;
  clearTimeout(timer);
  shown?.leave?.();
  shown = null;
  element("content").replaceChildren();
  if (!inside) {
    element("admin-key").focus();
    return;
  }
  const name = Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "overview";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = { ...VIEWS[name].mount(element("content"), { refresh }), sections: VIEWS[name].sections };
  refresh();
}

/** Asks now, and again in a while. Only the newest question may change the page. */
async function refresh() {
  clearTimeout(timer);
  if (!shown || document.hidden) return;
  const view = shown;
  const mine = ++turn;
  try {
    const seen = await admin("GET", `overview?sections=${["engine", "lanes", "models", ...view.sections].join(",")}${ofModel()}`);
    if (view !== shown || mine !== turn) return;
    failures = 0;
    offerModels(seen.models, seen.engine.served_name);
    tell(seen.engine);
    await view.update(seen);
    if (view !== shown || mine !== turn) return;
  } catch (error) {
    if (view !== shown || mine !== turn) return;
    if (error instanceof Refusal && error.isDoor) {
      leave("This key is not accepted any more.");
      return;
    }
    failures += 1;
    trouble(error);
  }
  timer = setTimeout(refresh, Math.min(PATIENCE_MS, EVERY_MS * 2 ** Math.min(failures, 4)));
}

function tell(engine) {
  element("trouble").hidden = true;
  element("house").classList.remove("stale");
  setText(element("engine"), `${engine.served_name} · ${engine.device}`);
  element("engine").title = engine.model;
  element("engine").className = "engine up";
}

function trouble(error) {
  setText(element("trouble"), `What you see is old: ${error.message}. Trying again.`);
  element("trouble").hidden = false;
  element("house").classList.add("stale");
  element("engine").className = "engine down";
}

/** The demo's banner links here with its key, which is public: `#key=sk-demo-admin`. The key leaves the address bar at
 * once. No other key is taken from a link, or a stranger's link could sign an operator in under a key of the stranger's. */
function takeKeyFromLink() {
  if (!location.hash.startsWith("#key=")) return;
  const key = location.hash.slice("#key=".length);
  history.replaceState(null, "", location.pathname + location.search);
  if (key.startsWith("sk-demo-") && !isSignedIn()) open(key);
}

async function open(key) {
  setText(element("door-error"), "");
  try {
    await fetchWith(key, "GET", "admin/v1/limits");
    signIn(key, element("keep").checked);
    element("admin-key").value = "";
    show();
    element("content").focus();
  } catch (error) {
    const strange = error instanceof Refusal && error.isDoor;
    setText(element("door-error"), strange ? "That is no administrator’s key here." : error.message);
    element("admin-key").select();
  }
}

function leave(why) {
  signOut();
  show();
  setText(element("door-error"), why);
}

element("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  open(element("admin-key").value.trim());
});
element("sign-out").addEventListener("click", () => leave(""));
addEventListener("hashchange", () => {
  takeKeyFromLink();
  show();
});
document.addEventListener("visibilitychange", refresh);
onModel(refresh);
addEventListener("unhandledrejection", (event) => toast(event.reason?.message ?? "something went wrong", "bad"));
takeKeyFromLink();
show();
