// The page's side of the HTTP API: what the browser keeps, the key, requests, and server-sent events.

const ROOT = new URL("..", import.meta.url);
const PATIENCE = 30; // seconds for an answer that is not a reply of the bot
const SILENCE = 120; // seconds without a byte, after which a reply counts as lost
const unkept = new Map();

/** localStorage under our own prefix; where the browser keeps nothing, it lasts until the page closes. */
export const kept = {
  get(name) {
    try {
      return localStorage.getItem(`rl_dialog.${name}`) ?? unkept.get(name) ?? null;
    } catch {
      return unkept.get(name) ?? null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`rl_dialog.${name}`, value);
    } catch {
      unkept.set(name, value);
    }
  },
  drop(name) {
    unkept.delete(name);
    try {
      localStorage.removeItem(`rl_dialog.${name}`);
    } catch {
      // nothing was kept
    }
  },
};

/** Who we are to the server: random, made once, and by getRandomValues because randomUUID exists on https only. */
export function userId() {
  if (!kept.get("user")) {
    const bytes = crypto.getRandomValues(new Uint8Array(12));
    kept.set("user", `user-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`);
  }
  return kept.get("user");
}

/** Moves the key of an address like /#key=sk-... into the browser's store, so that it is neither shown nor bookmarked. True if there was one. */
export function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return false;
  kept.set("key", key);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export class ServerError extends Error {
  /** status 0: there was no answer. wait: the seconds that the server asks us to wait, or null. */
  constructor(message, { status = 0, wait = null } = {}) {
    super(message);
    this.status = status;
    this.wait = wait;
  }
}

const keys = { needed: false, ask: null, asking: null };

/** ask(reason) resolves once a new key is kept, and rejects if the person has none. */
export function useKeys({ needed, ask }) {
  Object.assign(keys, { needed, ask });
}

function askForKey(reason) {
  keys.asking ??= keys.ask(reason).finally(() => (keys.asking = null)); // two requests, one question
  return keys.asking;
}

/** The response of a request that the server accepted. Asks for the key where one is missing or refused, then tries again. */
async function request(method, path, { body, signal } = {}) {
  for (;;) {
    if (keys.needed && !kept.get("key")) await askForKey("");
    const key = kept.get("key");
    const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await reach(new URL(path, ROOT), { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
    if (response.ok) return response;
    const error = await refusal(response);
    if (response.status !== 401 || !keys.ask) throw error;
    await askForKey(key ? "The server does not accept this key." : "");
  }
}

async function reach(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const slow = error.name === "TimeoutError";
    throw new ServerError(slow ? `The server did not answer within ${PATIENCE} seconds.` : "The server cannot be reached. Are you online?");
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  const seconds = Math.ceil(Number.parseFloat(response.headers.get("Retry-After") ?? ""));
  const facts = { status: response.status, wait: Number.isFinite(seconds) ? seconds : null };
  if (answer?.error?.code === "queue_full") return new ServerError("Many people are chatting right now.", facts);
  if (response.status === 429) return new ServerError("That was too much in a short time.", facts);
  return new ServerError(answer?.error?.message ?? `The server answered with an error (${response.status}).`, facts);
}

/** A request with a JSON answer. */
export async function call(method, path, body) {
  const response = await request(method, path, { body, signal: AbortSignal.timeout(PATIENCE * 1000) });
  return response.json();
}

/** The chunks of a streamed chat completion. Returns at its end; throws if the server reports an error or the stream breaks off. */
export async function* complete(body, signal) {
  const response = await request("POST", "v1/chat/completions", { body: { ...body, stream: true }, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The server could not finish the reply.");
    yield chunk;
  }
  throw new ServerError("The connection broke before the reply was complete.");
}

/** The data of each server-sent event, wherever the network cut the bytes. */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return; // an event without its empty line is not one
      rest += decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/); // a last \r may be half of \r\n
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ServerError(`The server has been silent for ${SILENCE} seconds.`)), SILENCE * 1000);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection broke before the reply was complete.");
  } finally {
    clearTimeout(timer);
  }
}
