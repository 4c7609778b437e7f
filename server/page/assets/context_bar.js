/** The bar of the context: prompt and room of the answer against the tiers. */

import { byId, grouped, make } from "./dom.js";

/** Returns the tiers that a request may have, ascending, as the server lists them. */
function tiersOf(model) {
  return model.ropewalk?.tiers ?? [{ max_len: model.max_model_len, factor: 1 }];
}

/**
 * Returns the tier of a request before it is sent, or null if it fits none.
 *
 * A request covers prompt + max_tokens - 1 positions, because the last token is never read back.
 * Without max_tokens, the answer needs the deployment's reserve.
 */
export function tierFor(model, numPrompt, maxTokens, rope) {
  const tiers = tiersOf(model);
  const policy = rope?.policy ?? model.ropewalk?.policy ?? "pinned";
  const reserve = maxTokens ?? model.ropewalk?.answer_reserve_tokens ?? 1;
  const grows = policy === "grow" || policy === "grow-exact";
  const covered = grows ? numPrompt : numPrompt + reserve - 1;
  const factor = rope?.factor ?? 1;
  if (policy === "fixed" && rope?.factor === undefined) {
    const last = tiers[tiers.length - 1];
    return covered <= last.max_len ? last : null;
  }
  return tiers.find((tier) => tier.max_len >= covered && tier.factor >= factor) ?? null;
}

/** Draws the bar. `numPrompt` is null while it is unknown. */
export function drawContext(model, numPrompt, maxTokens, rope, numDone = null) {
  const tiers = tiersOf(model);
  const longest = tiers[tiers.length - 1].max_len;
  const bar = byId("context");
  const share = (tokens) => `${Math.min(100, (100 * tokens) / longest)}%`;
  const prompt = numPrompt ?? 0;
  byId("context-prompt").style.width = share(prompt);
  byId("context-done").style.width = share(numDone ?? 0);
  byId("context-answer").style.left = share(prompt);
  byId("context-answer").style.width = share(Math.min(maxTokens ?? 0, Math.max(0, longest - prompt)));
  const tier = numPrompt === null ? null : tierFor(model, prompt, maxTokens, rope);
  const ticks = tiers.map((each) => {
    const label = each === tiers[0] ? `L ${grouped(each.max_len)}` : grouped(each.max_len);
    const tick = make("span", { className: each === tier ? "tick in-force" : "tick" }, label);
    tick.style.left = share(each.max_len);
    return tick;
  });
  byId("context-ticks").replaceChildren(...ticks);
  let text = "counting tokens";
  if (numPrompt !== null) {
    const type = rope?.rope_type ?? tier?.rope_type ?? "";
    text = tier
      ? `${grouped(prompt)} of ${grouped(longest)} tokens, tier ${tier.factor}x ${type}`
      : `${grouped(prompt)} of ${grouped(longest)} tokens, fits no tier`;
  }
  bar.setAttribute("aria-valuemax", longest);
  bar.setAttribute("aria-valuenow", Math.min(prompt, longest));
  bar.setAttribute("aria-valuetext", text);
  byId("context-text").textContent = text;
  return tier;
}
