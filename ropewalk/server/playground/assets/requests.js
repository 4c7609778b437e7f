/** The request that the controls describe. */

import { byId } from "./dom.js";

const NUMBERS = {
  "rope-factor": "Factor",
  "max-tokens": "Max tokens",
  temperature: "Temperature",
  "top-p": "Top p",
  seed: "Seed",
  "top-logprobs": "Alternatives",
};

/** Returns the number in a field; undefined if it is empty or no number. */
const number = (id) => {
  const text = byId(id).value.trim();
  return text === "" || Number.isNaN(Number(text)) ? undefined : Number(text);
};

/** Marks the fields whose text is no number; returns a sentence about the first, or "". */
export function mistypedNumber() {
  let sentence = "";
  for (const [id, label] of Object.entries(NUMBERS)) {
    const text = byId(id).value.trim();
    const isWrong = text !== "" && Number.isNaN(Number(text));
    byId(id).setAttribute("aria-invalid", isWrong);
    if (isWrong && !sentence) {
      sentence = `${label} must be a number. Given: ${text}`;
    }
  }
  return sentence;
}

/** Returns the rope object of the controls, or undefined if all is as deployed. */
export function chosenRope() {
  const rope = {};
  if (byId("rope-type").value) {
    rope.rope_type = byId("rope-type").value;
  }
  if (number("rope-factor") !== undefined) {
    rope.factor = number("rope-factor");
  }
  if (byId("rope-policy").value) {
    rope.policy = byId("rope-policy").value;
  }
  return Object.keys(rope).length ? rope : undefined;
}

export const isChat = () => byId("mode-chat").checked;

/** Returns the messages of the chat, with the text that is not sent yet. */
export function messagesWith(conversation, text) {
  const system = byId("system").value;
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...conversation, { role: "user", content: text }];
}

/** Returns {path, body} of the request for a prompt; fields at their defaults are left out. */
export function requestFor(text, conversation, changes = {}) {
  const body = { model: byId("model").value };
  if (isChat()) {
    body.messages = messagesWith(conversation, text);
  } else {
    body.prompt = text;
  }
  const stop = byId("stop").value;
  const fields = {
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed: number("seed"),
    stop: stop === "" ? undefined : stop.replaceAll("\\n", "\n"),
    rope: chosenRope(),
  };
  for (const [name, value] of Object.entries(fields)) {
    if (value !== undefined) {
      body[name] = value;
    }
  }
  if (byId("logprobs").checked) {
    const alternatives = number("top-logprobs") ?? 0;
    Object.assign(body, isChat() ? { logprobs: true, top_logprobs: alternatives } : { logprobs: alternatives });
  }
  for (const [name, value] of Object.entries(changes)) {
    if (value === undefined) {
      delete body[name];
    } else {
      body[name] = value;
    }
  }
  return { path: isChat() ? "v1/chat/completions" : "v1/completions", body };
}
