/** Requests to the server that this page came from. The key is kept in this module's memory only. */

const ROOT = new URL("../", document.baseURI); // the page is at PREFIX/playground/
let key = "";

/** The server's root without a slash at its end, which may contain a proxy's prefix. */
export const rootUrl = ROOT.href.replace(/\/$/, "");

export function setKey(value) {
  key = value.trim();
}

export function hasKey() {
  return key !== "";
}

/** An answer that is no success, with the server's own sentence. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.error = error ?? {};
  }
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key) {
    headers.Authorization = `Bearer ${key}`;
  }
  let response;
  try {
    response = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError(0, { message: "The server cannot be reached." });
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ApiError(response.status, body.error);
  }
  return response;
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

export async function getJson(path, signal) {
  return (await send(path, { signal })).json();
}

export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

/** Splits a stream of server-sent events into their data. Comments are skipped. */
export class EventParser {
  #rest = "";

  /** Returns the data of every event that `text` completes. */
  push(text) {
    this.#rest += text;
    const found = [];
    for (;;) {
      const end = /\r?\n\r?\n/.exec(this.#rest);
      if (end === null) {
        return found;
      }
      const lines = this.#rest.slice(0, end.index).split(/\r?\n/);
      this.#rest = this.#rest.slice(end.index + end[0].length);
      const data = lines.filter((line) => line.startsWith("data:"));
      if (data.length) {
        found.push(data.map((line) => line.slice(5).replace(/^ /, "")).join("\n"));
      }
    }
  }
}

/** Yields the events of a streamed answer. An `error` event becomes an ApiError. */
export async function* streamed(path, body, signal) {
  const response = await post(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      for (const data of parser.push(value)) {
        if (data === "[DONE]") {
          return;
        }
        const event = JSON.parse(data);
        if (event.error) {
          throw new ApiError(response.status, event.error);
        }
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
