// The admin key, and every call made with it. The key is in memory, and in this tab's storage if its owner says so; it
// travels in the Authorization header and nowhere else.

const SLOT = "loralane-admin-key";
let adminKey = sessionStorage.getItem(SLOT) ?? "";

export const isSignedIn = () => adminKey !== "";
export const isAdminKey = (text) => isSignedIn() && text === adminKey;

export function signIn(key, keep) {
  adminKey = key;
  if (keep) sessionStorage.setItem(SLOT, key);
}

export function signOut() {
  adminKey = "";
  sessionStorage.removeItem(SLOT);
}

/** What the gateway refused, in its own words. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `the gateway answered ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }

  get isDoor() {
    return this.status === 401 || this.status === 403;
  }
}

/** Throws Refusal for what the gateway refuses, and Error where it cannot be reached. */
export async function fetchWith(key, method, path, body, signal) {
  const headers = { authorization: `Bearer ${key}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method, headers, signal, cache: "no-store", credentials: "omit", redirect: "error" };
  let response;
  try {
    response = await fetch(path, { ...options, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the gateway cannot be reached");
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Refusal(response.status, answer?.error);
  }
  return response;
}

/** A call of the admin API; the answer's JSON. */
export async function admin(method, path, body) {
  const response = await fetchWith(adminKey, method, `admin/v1/${path}`, body);
  return response.json();
}

/** A call of the admin API that answers with a file. */
export async function adminBlob(path) {
  const response = await fetchWith(adminKey, "GET", `admin/v1/${path}`);
  return response.blob();
}
