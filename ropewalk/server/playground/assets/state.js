/** State of the page, and the buttons that may be pressed now. */

import { Answer } from "./answer.js";
import { byId } from "./dom.js";

export const state = {
  models: [],
  conversation: [],
  expected: null, // the needle's value, while its prompt is unchanged
  lastText: null, // the prompt of the last request
  told: null, // the server's answer about the prompt: its tokens and its table
  running: null, // the AbortController of the request in flight
  isFilling: false, // while the needle's prompt is on its way
};

/** The two panes; page.js says what an alternative of a token does. */
export const answers = ["answer-a", "answer-b"].map((id) => new Answer(byId(id)));

export const model = () => state.models.find((each) => each.id === byId("model").value) ?? state.models[0];

export const status = (text) => (byId("status").textContent = text);

/** Shows an error as the server words it. A 401 asks for the key. */
export function fail(error) {
  if (error.name === "AbortError") {
    status("stopped");
    return;
  }
  byId("alert").textContent = error.message;
  status("");
  if (error.status === 401 && !byId("key-dialog").open) {
    byId("key-dialog").showModal();
  }
}

export const canSend = () => state.models.length > 0 && state.running === null && !state.isFilling;

/** Lets those buttons be pressed whose work can be done now. */
export function enable() {
  byId("send").disabled = byId("needle").disabled = !canSend();
  byId("again").disabled = byId("continue").disabled = !canSend() || state.lastText === null;
  byId("stop-button").disabled = state.running === null;
}
