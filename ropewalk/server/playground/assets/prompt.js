/** Text about a prompt before it is sent: its tokens, its table, and its code. */

import { hasKey, postJson, rootUrl } from "./api.js";
import { drawContext } from "./context_bar.js";
import { byId, settled } from "./dom.js";
import { requestFor } from "./requests.js";
import { asCurl, asJson, asPython } from "./snippets.js";
import { fail, model, state } from "./state.js";

const OF_TIER = ["model", "prompt", "messages", "max_tokens", "rope"];
let numAsked = 0;
let toldOf = ""; // the fields that `state.told` answers

/** Asks the server for the prompt's tokens and table, then draws the bar and the code. */
export async function count() {
  showCode();
  if (!state.models.length) {
    return;
  }
  const { body } = requestFor(byId("prompt").value, state.conversation);
  const fields = Object.fromEntries(OF_TIER.filter((name) => name in body).map((name) => [name, body[name]]));
  const text = JSON.stringify(fields);
  numAsked += 1;
  const asked = numAsked;
  try {
    const told = text === toldOf ? state.told : await postJson("playground/tier", fields);
    if (asked === numAsked) {
      state.told = told;
      toldOf = text;
      drawBar();
    }
  } catch (error) {
    fail(error);
  }
}

export const countSoon = settled(count, 250);

/** Draws the bar. `numDone` tokens of the prompt are read. */
export function drawBar(numDone = 0) {
  drawContext(model(), state.told, Number(byId("max-tokens").value) || 0, numDone);
}

/** Shows the request as code. */
export function showCode() {
  if (!state.models.length) {
    return;
  }
  const { path, body } = requestFor(byId("prompt").value, state.conversation);
  let text = asJson(body);
  if (byId("code-curl").checked) {
    text = asCurl(rootUrl, path, body, hasKey());
  } else if (byId("code-python").checked) {
    text = asPython(rootUrl, path, body, hasKey());
  }
  byId("code").textContent = text;
}
