/** The page: wires the controls to requests, answers, the context bar and the chart. */

import { Answer, difference } from "./answer.js";
import { getJson, hasKey, postJson, rootUrl, setKey } from "./api.js";
import { drawChart, noteOwn, noteStats } from "./chart.js";
import { drawContext } from "./context_bar.js";
import { byId, grouped, make, settled } from "./dom.js";
import { chosenRope, isChat, messagesWith, mistypedNumber, requestFor } from "./requests.js";
import { asCurl, asJson, asPython } from "./snippets.js";
import { followScheme } from "./theme.js";

const POLL_MS = 2000;
const MOST_TURNS = 100; // of a conversation that the page keeps and shows

let models = [];
let conversation = [];
let expected = null; // the needle's value, while its prompt is unchanged
let lastText = null; // the prompt of the last request
let numPrompt = null; // tokens of the current prompt, by the server's tokenizer
let running = null; // the AbortController of the request in flight
let isFilling = false; // while the needle's prompt is on its way
let isPolling = false;

const [first, second] = ["answer-a", "answer-b"].map(
  (id) => new Answer(byId(id), (before, alternative) => continueFrom(before + alternative)),
);
const model = () => models.find((each) => each.id === byId("model").value) ?? models[0];
const maxTokens = () => Number(byId("max-tokens").value) || null;
const status = (text) => (byId("status").textContent = text);

/** Shows an error as the server words it. A 401 asks for the key. */
function fail(error) {
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

/** Waits until the model is loaded, then fills the controls. Only then can a prompt be sent. */
async function connect() {
  for (;;) {
    try {
      await getJson("ready");
      models = (await getJson("v1/models")).data;
      break;
    } catch (error) {
      const { phase, bytes_done: done, bytes_total: total } = error.error ?? {};
      const share = total ? `, ${Math.floor((100 * done) / total)} %` : "";
      byId("server-state").textContent = phase ? `loading: ${phase}${share}` : error.message;
      if (error.status === 401) {
        byId("server-state").textContent = "needs a key";
        fail(error);
        return; // until a key is typed
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  byId("alert").textContent = "";
  byId("model").replaceChildren(...models.map((each) => make("option", {}, each.id)));
  fillForModel();
  enable();
  byId("server-state").textContent = "ready";
  if (!isPolling) {
    isPolling = true;
    poll();
  }
}

/** Lets those buttons be pressed whose work can be done now. */
function enable() {
  const isFree = models.length > 0 && running === null && !isFilling;
  byId("send").disabled = byId("needle").disabled = !isFree;
  byId("again").disabled = byId("continue").disabled = !isFree || lastText === null;
  byId("stop-button").disabled = running === null;
}

/** Fills the choices that depend on the model. */
function fillForModel() {
  const types = model().ropewalk?.allowed_rope_types ?? [];
  const option = (value, label) => make("option", { value }, label);
  byId("rope-type").replaceChildren(option("", "as deployed"), ...types.map((each) => option(each, each)));
  byId("compare-with").replaceChildren(
    option(JSON.stringify({ rope: { rope_type: "default" } }), "no scaling"),
    ...types
      .filter((each) => each !== "default")
      .map((each) => option(JSON.stringify({ rope: { rope_type: each } }), each)),
    ...models
      .filter((each) => each !== model())
      .map((each) => option(JSON.stringify({ model: each.id, rope: null }), each.id)),
  );
  byId("needle-len").value = model().max_model_len - 16;
  count();
}

/** Asks the server for the prompt's tokens, then draws the bar and the code. */
async function count() {
  const text = byId("prompt").value;
  showCode();
  const body = { model: model()?.id };
  if (isChat()) {
    body.messages = messagesWith(conversation, text);
  } else {
    body.prompt = text;
  }
  try {
    const { count: found } = await postJson("tokenize", body);
    if (text === byId("prompt").value) {
      numPrompt = found;
      drawBar();
    }
  } catch (error) {
    fail(error);
  }
}

const drawBar = (done = null) => models.length && drawContext(model(), numPrompt, maxTokens(), chosenRope(), done);
const countSoon = settled(count, 250);

function showCode() {
  if (!models.length) {
    return;
  }
  const { path, body } = requestFor(byId("prompt").value, conversation);
  let text = asJson(body);
  if (byId("code-curl").checked) {
    text = asCurl(rootUrl, path, body, hasKey());
  } else if (byId("code-python").checked) {
    text = asPython(rootUrl, path, body, hasKey());
  }
  byId("code").textContent = text;
}

/** Sends the prompt, to both settings if they are compared. */
async function send(text = byId("prompt").value) {
  if (running !== null || isFilling || !models.length) {
    return;
  }
  const mistake = mistypedNumber() || (isChat() && !text.trim() ? "The message is empty." : "");
  byId("alert").textContent = mistake;
  if (mistake) {
    return;
  }
  running = new AbortController();
  byId("difference").textContent = "";
  const isCompared = byId("compare").checked;
  byId("answer-b").hidden = !isCompared;
  lastText = text;
  enable();
  if (isChat()) {
    addTurn({ role: "user", content: text });
  }
  const before = isChat() ? conversation.slice(0, -1) : [];
  const runs = [[first, requestFor(text, before)]];
  if (isCompared) {
    const { rope, ...changes } = JSON.parse(byId("compare-with").value);
    runs.push([second, requestFor(text, before, { ...changes, rope: rope ?? undefined })]);
  }
  status("answering");
  const signal = running.signal;
  const onProgress = (progress) => {
    status(`reading the prompt, ${grouped(progress.processed)} of ${grouped(progress.total)} tokens`);
    drawBar(progress.processed);
  };
  const began = performance.now();
  const ended = await Promise.allSettled(
    runs.map(([answer, request], at) => {
      answer.pane.querySelector(".name").textContent = nameOf(request.body);
      return answer.run(request, signal, at === 0 ? onProgress : null);
    }),
  );
  running = null;
  enable();
  const failed = ended.find((each) => each.status === "rejected");
  for (const [answer] of runs) {
    if (answer.usage) {
      noteOwn(answer.usage.prompt_tokens, answer.firstSeconds, answer.tokenSeconds);
    }
    if (expected !== null && answer.text) {
      answer.judge(expected);
    }
  }
  if (isChat() && first.text) {
    addTurn({ role: "assistant", content: first.text });
    byId("prompt").value = "";
  }
  count();
  drawChart();
  if (failed) {
    fail(failed.reason);
    return;
  }
  if (isCompared) {
    byId("difference").textContent = difference(first.text, second.text);
  }
  const tokens = runs.reduce((sum, [answer]) => sum + (answer.usage?.completion_tokens ?? 0), 0);
  status(`done, ${tokens} tokens in ${((performance.now() - began) / 1000).toFixed(2)} s`);
}

const nameOf = (body) => `${body.model}${body.rope?.rope_type ? `, ${body.rope.rope_type}` : ""}`;

function addTurn(turn) {
  conversation.push(turn);
  conversation = conversation.slice(-MOST_TURNS);
  const shown = conversation.map((each) => make("li", { className: each.role }, `${each.role}: ${each.content}`));
  byId("transcript").replaceChildren(...shown);
}

/** Continues the last answer from a text that replaces it. */
function continueFrom(text) {
  if (isChat()) {
    byId("alert").textContent = "Continue from a token in Complete mode; a chat prompt ends before its answer.";
    return;
  }
  byId("prompt").value = lastText + text;
  expected = null;
  send();
}

function regenerate() {
  if (isChat()) {
    const asked = conversation.findLast((each) => each.role === "user");
    conversation = conversation.slice(0, conversation.lastIndexOf(asked));
    send(asked?.content ?? "");
  } else {
    send(lastText);
  }
}

function clear() {
  running?.abort();
  conversation = [];
  expected = null;
  byId("transcript").replaceChildren();
  byId("prompt").value = "";
  first.clear();
  second.clear();
  byId("difference").textContent = "";
  status("");
  count();
}

/** Fills in a long prompt with a hidden value, for a comparison in one click. */
async function fillNeedle() {
  const query = new URLSearchParams({
    context_len: byId("needle-len").value,
    depth: byId("needle-depth").value,
    seed: Math.floor(Math.random() * 1e6),
    model: model().id,
  });
  isFilling = true;
  enable();
  status("filling in");
  try {
    const needle = await getJson(`playground/needle?${query}`);
    byId("mode-complete").checked = true;
    byId("prompt").value = needle.prompt;
    byId("max-tokens").value = needle.max_tokens;
    byId("temperature").value = "0";
    byId("compare").checked = true;
    expected = needle.expected;
    status(`the value ${needle.expected} is hidden at depth ${needle.depth.toFixed(2)}`);
    switchMode();
  } catch (error) {
    fail(error);
  }
  isFilling = false;
  enable();
}

function switchMode() {
  byId("chat-parts").hidden = !isChat();
  byId("prompt-label").textContent = isChat() ? "Message" : "Prompt";
  count();
}

/** Draws the server's counts every two seconds while the page is visible. */
async function poll() {
  if (!document.hidden) {
    try {
      const stats = await getJson("stats");
      noteStats(stats);
      const used = (100 * stats.kv_cache_usage_ratio).toFixed(0);
      byId("load").textContent =
        `queue ${stats.requests_waiting} · running ${stats.requests_running} · cache ${used} %`;
      drawChart();
    } catch (error) {
      byId("load").textContent = error.status === 401 ? "" : error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}

const onClick = {
  send: () => send(),
  "stop-button": () => running?.abort(),
  again: regenerate,
  continue: () => continueFrom(first.text),
  clear,
  needle: fillNeedle,
  "key-button": () => byId("key-dialog").showModal(),
  "help-button": () => byId("help").showModal(),
  copy: () => navigator.clipboard?.writeText(byId("code").textContent),
};
for (const [id, work] of Object.entries(onClick)) {
  byId(id).addEventListener("click", work);
}
byId("key-form").addEventListener("submit", () => {
  setKey(byId("key").value);
  byId("key").value = "";
  connect();
});
byId("model").addEventListener("change", fillForModel);
byId("prompt").addEventListener("input", () => {
  expected = null;
  countSoon();
});
for (const id of ["mode-complete", "mode-chat"]) {
  byId(id).addEventListener("change", switchMode);
}
for (const element of document.querySelectorAll("aside input, aside select, #system")) {
  element.addEventListener("input", () => {
    byId("alert").textContent = mistypedNumber();
    showCode();
    drawBar();
    drawChart();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape" && running !== null) {
    running.abort();
  } else if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "l") {
    event.preventDefault();
    clear();
  }
});
followScheme();
connect();
