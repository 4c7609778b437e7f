/** Sends the prompt: to one setting, or to two, one after the other. */

import { difference } from "./answer.js";
import { drawChart, noteOwn } from "./chart.js";
import { byId, grouped, make } from "./dom.js";
import { count, drawBar } from "./prompt.js";
import { isChat, mistypedNumber, requestFor } from "./requests.js";
import { answers, canSend, enable, fail, state, status } from "./state.js";

const MOST_TURNS = 100; // of a conversation that the page keeps and shows

const [first, second] = answers;

/** Sends what is typed. An empty prompt is legal, but seldom meant, so the page asks first. */
export function sendTyped() {
  const text = byId("prompt").value;
  if (text === "" && !isChat() && canSend()) {
    byId("empty-dialog").showModal();
  } else {
    send(text);
  }
}

/** Sends a text, if nothing is on its way and no field is mistyped. */
export async function send(text) {
  if (!canSend()) {
    return;
  }
  const mistake = mistypedNumber() || (isChat() && !text.trim() ? "The message is empty." : "");
  byId("alert").textContent = mistake;
  if (mistake) {
    return;
  }
  state.running = new AbortController();
  state.lastText = text;
  enable();
  if (isChat()) {
    addTurn({ role: "user", content: text });
  }
  const runs = runsOf(text);
  showPanes(runs);
  const began = performance.now();
  const failure = await answerAll(runs, state.running.signal);
  state.running = null;
  enable();
  finish(runs, failure, (performance.now() - began) / 1000);
}

/** Returns the panes that answer, each with its request. */
function runsOf(text) {
  const before = isChat() ? state.conversation.slice(0, -1) : [];
  const runs = [[first, requestFor(text, before)]];
  if (byId("compare").checked) {
    const { rope, ...changes } = JSON.parse(byId("compare-with").value);
    runs.push([second, requestFor(text, before, { ...changes, rope: rope ?? undefined })]);
  }
  return runs;
}

function showPanes(runs) {
  byId("invitation").hidden = true;
  byId("difference").textContent = "";
  for (const answer of answers) {
    answer.clear();
    answer.pane.hidden = true;
  }
  for (const [answer, { body }] of runs) {
    answer.pane.hidden = false;
    const type = body.rope?.rope_type;
    answer.pane.querySelector(".name").textContent = `${body.model}${type ? `, ${type}` : ""}`;
  }
}

/**
 * Streams the answers one after the other, because two at once share the engine, and each would
 * show the time of both. Returns the first error, or null.
 */
async function answerAll(runs, signal) {
  let failure = null;
  for (const [answer, request] of runs) {
    const name = runs.length > 1 ? ` ${answer === first ? "A" : "B"}` : "";
    status(`answering${name}`);
    try {
      await answer.run(request, signal, ({ processed, total }) => {
        status(`reading the prompt${name && ` of${name}`}, ${grouped(processed)} of ${grouped(total)} tokens`);
        drawBar(processed);
      });
    } catch (error) {
      failure ??= error;
      if (signal.aborted) {
        break;
      }
    }
  }
  return failure;
}

function finish(runs, failure, seconds) {
  for (const [answer] of runs) {
    if (answer.usage) {
      noteOwn(answer.usage.prompt_tokens, answer.firstSeconds, answer.tokenSeconds);
    }
    if (state.expected !== null && answer.text) {
      answer.judge(state.expected);
    }
  }
  if (isChat() && first.text) {
    addTurn({ role: "assistant", content: first.text });
    byId("prompt").value = "";
  }
  count();
  drawChart();
  if (failure !== null) {
    fail(failure);
    return;
  }
  if (runs.length > 1) {
    byId("difference").textContent = difference(first.text, second.text);
  }
  const tokens = runs.reduce((sum, [answer]) => sum + (answer.usage?.completion_tokens ?? 0), 0);
  status(`done, ${tokens} tokens in ${seconds.toFixed(2)} s`);
}

function addTurn(turn) {
  state.conversation.push(turn);
  state.conversation = state.conversation.slice(-MOST_TURNS);
  const shown = state.conversation.map((each) => make("li", { className: each.role }, `${each.role}: ${each.content}`));
  byId("transcript").replaceChildren(...shown);
}

/** Continues the last answer from a text that replaces it. */
export function continueFrom(text) {
  if (isChat()) {
    byId("alert").textContent = "Continue from a token in Complete mode; a chat prompt ends before its answer.";
    return;
  }
  byId("prompt").value = state.lastText + text;
  state.expected = null;
  send(byId("prompt").value);
}

/** Sends the last prompt again. */
export function regenerate() {
  if (isChat()) {
    const asked = state.conversation.findLast((each) => each.role === "user");
    state.conversation = state.conversation.slice(0, state.conversation.lastIndexOf(asked));
    send(asked?.content ?? "");
  } else {
    send(state.lastText);
  }
}

/** Forgets the prompt, the conversation and the answers. */
export function clear() {
  state.running?.abort();
  state.conversation = [];
  state.expected = null;
  byId("transcript").replaceChildren();
  byId("prompt").value = "";
  for (const answer of answers) {
    answer.clear();
    answer.pane.hidden = true;
  }
  byId("invitation").hidden = false;
  byId("difference").textContent = "";
  status("");
  count();
}
