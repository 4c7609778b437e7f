/** The page: wires the controls to requests, answers, the context bar and the chart. */

import { getJson, setKey } from "./api.js";
import { drawChart } from "./chart.js";
import { connect, fillForModel } from "./connection.js";
import { byId } from "./dom.js";
import { count, countSoon, showCode } from "./prompt.js";
import { isChat, mistypedNumber } from "./requests.js";
import { clear, continueFrom, regenerate, send, sendTyped } from "./sending.js";
import { answers, enable, fail, model, state, status } from "./state.js";
import { followScheme } from "./theme.js";

/** Fills in a long prompt with a hidden value, for a comparison in one click. */
async function fillNeedle() {
  const query = new URLSearchParams({
    context_len: byId("needle-len").value,
    depth: byId("needle-depth").value,
    seed: Math.floor(Math.random() * 1e6),
    model: model().id,
  });
  state.isFilling = true;
  enable();
  status("filling in");
  try {
    const needle = await getJson(`playground/needle?${query}`);
    byId("alert").textContent = "";
    byId("mode-complete").checked = true;
    byId("prompt").value = needle.prompt;
    byId("max-tokens").value = needle.max_tokens;
    byId("temperature").value = "0";
    byId("compare").checked = true;
    state.expected = needle.expected;
    status(`the value ${needle.expected} is hidden at depth ${needle.depth.toFixed(2)}`);
    switchMode();
  } catch (error) {
    fail(error);
  }
  state.isFilling = false;
  enable();
}

function switchMode() {
  byId("chat-parts").hidden = !isChat();
  byId("prompt-label").textContent = isChat() ? "Message" : "Prompt";
  count();
}

for (const answer of answers) {
  answer.onChoose = (before, alternative) => continueFrom(before + alternative);
}
const onClick = {
  send: sendTyped,
  "stop-button": () => state.running?.abort(),
  again: regenerate,
  continue: () => continueFrom(answers[0].text),
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
  connect(switchMode);
});
byId("empty-form").addEventListener("submit", (event) => {
  if (event.submitter?.value === "send") {
    send("");
  }
});
byId("model").addEventListener("change", () => {
  fillForModel();
  count();
});
byId("prompt").addEventListener("input", () => {
  state.expected = null;
  countSoon();
});
for (const id of ["mode-complete", "mode-chat"]) {
  byId(id).addEventListener("change", switchMode);
}
for (const element of document.querySelectorAll("aside input, aside select, #system")) {
  element.addEventListener("input", () => {
    byId("alert").textContent = mistypedNumber();
    showCode();
    countSoon();
    drawChart();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    sendTyped();
  } else if (event.key === "Escape") {
    state.running?.abort();
  } else if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "l") {
    event.preventDefault();
    clear();
  }
});
followScheme();
connect(switchMode);
