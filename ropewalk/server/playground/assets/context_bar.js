/** The bar of the context: prompt and room of the answer against the tiers. */

import { byId, grouped, make } from "./dom.js";

/** Returns the lengths that the bar marks, ascending: L, and the end of each tier. */
function marksOf(model) {
  const ends = (model.ropewalk?.tiers ?? []).map((tier) => tier.max_len);
  const native = Math.min(model.meta?.n_ctx_train ?? model.max_model_len, model.max_model_len);
  return [...new Set([native, ...ends])].sort((one, other) => one - other);
}

/** Returns a request's tokens and table in words. `told` is the answer of /playground/tier. */
function worded({ count, max_model_len: longest, rope, problem }) {
  const tokens = `${grouped(count)} of ${grouped(longest)} tokens`;
  if (problem !== null) {
    return `${tokens}. ${problem}`;
  }
  const beyond = rope.beyond_trained_length ? ", beyond the trained length" : "";
  return `${tokens}, tier ${rope.factor}x ${rope.rope_type}${beyond}`;
}

/** Draws the bar. `told` is null while the server counts; `numDone` tokens of the prompt are read. */
export function drawContext(model, told, maxTokens, numDone) {
  const longest = model.max_model_len;
  const share = (tokens) => `${Math.min(100, (100 * tokens) / longest)}%`;
  const prompt = told?.count ?? 0;
  byId("context-prompt").style.width = share(prompt);
  byId("context-done").style.width = share(numDone);
  byId("context-answer").style.left = share(prompt);
  byId("context-answer").style.width = share(Math.min(maxTokens, Math.max(0, longest - prompt)));
  const ticks = marksOf(model).map((end) => {
    const label = end === model.meta?.n_ctx_train ? `L ${grouped(end)}` : grouped(end);
    const tick = make("span", { className: end === told?.tier_len ? "tick in-force" : "tick" }, label);
    tick.style.left = share(end);
    return tick;
  });
  byId("context-ticks").replaceChildren(...ticks);
  const text = told === null ? "counting tokens" : worded(told);
  const bar = byId("context");
  bar.setAttribute("aria-valuemax", longest);
  bar.setAttribute("aria-valuenow", Math.min(prompt, longest));
  bar.setAttribute("aria-valuetext", text);
  byId("context-text").textContent = text;
}
