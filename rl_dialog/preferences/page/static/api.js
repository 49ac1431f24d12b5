// The pages' side of the HTTP API: what this browser window keeps, the token, requests.

const ROOT = new URL("..", import.meta.url); // relative, so that the pages also work below a prefix of a reverse proxy
const PATIENCE = 15; // seconds for an answer
const unkept = new Map();

/** sessionStorage under our own prefix; where the browser keeps nothing, it lasts until the page closes. */
export const kept = {
  get(name) {
    try {
      return JSON.parse(sessionStorage.getItem(`rl_dialog.labels.${name}`)) ?? unkept.get(name) ?? null;
    } catch {
      return unkept.get(name) ?? null;
    }
  },
  set(name, value) {
    unkept.set(name, value);
    try {
      sessionStorage.setItem(`rl_dialog.labels.${name}`, JSON.stringify(value));
    } catch {
      // full or forbidden: it stays in this page
    }
  },
  drop(name) {
    unkept.delete(name);
    try {
      sessionStorage.removeItem(`rl_dialog.labels.${name}`);
    } catch {
      // nothing was kept
    }
  },
};

/** Moves the token of an address like /#token=sk-rl-... into the window's store, so that it is neither shown nor bookmarked. */
export function takeTokenFromAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  kept.set("token", token);
  history.replaceState(null, "", location.pathname + location.search);
}

export class ServerError extends Error {
  /** status 0: there was no answer. */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let asking = null;

/** Shows the page's dialog for the token until one is entered. Two requests that need it ask once. */
export function askForToken(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token-dialog");
    const input = document.getElementById("token");
    const error = document.getElementById("token-error");
    error.textContent = reason;
    error.hidden = !reason;
    input.value = "";
    dialog.oncancel = (event) => event.preventDefault(); // nothing works without one
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      const token = input.value.trim();
      if (!/^[!-~]+$/.test(token)) {
        error.textContent = "A token has no spaces and no accents.";
        error.hidden = false;
        return;
      }
      kept.set("token", token);
      dialog.close();
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

let needed = false;

/** What GET page.json says. */
export async function pageSettings() {
  const settings = await (await reach("page.json", {})).json();
  needed = settings.needs_token;
  return settings;
}

/** The response to a request that the server accepted. Asks for the token where it is missing or refused. Raises ServerError. */
async function request(method, path, { body, key, keepalive } = {}) {
  for (;;) {
    if (needed && !kept.get("token")) await askForToken("");
    const token = kept.get("token");
    const headers = {
      ...(body !== undefined && { "Content-Type": "application/json" }),
      ...(token && { Authorization: `Bearer ${token}` }),
      ...(key && { "Idempotency-Key": key }),
    };
    const response = await reach(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), keepalive });
    if (response.ok) return response;
    if (response.status === 401) {
      if (kept.get("token") === token) {
        kept.drop("token");
        await askForToken(token ? "The server does not know this token." : "");
      }
      continue;
    }
    const told = await response.json().catch(() => null);
    throw new ServerError(told?.error?.message ?? `the server answered ${response.status}`, response.status);
  }
}

async function reach(path, options) {
  try {
    return await fetch(new URL(path, ROOT), { signal: AbortSignal.timeout(1000 * PATIENCE), ...options });
  } catch {
    throw new ServerError("The server cannot be reached.");
  }
}

export const get = async (path) => (await request("GET", path)).json();
export const post = async (path, body = {}, options = {}) => (await request("POST", path, { body, ...options })).json();
export const getBlob = async (path) => (await request("GET", path)).blob();

/** Random, and by getRandomValues because randomUUID exists on https only. */
export const randomId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
