/** One pane with a streamed answer: its text, its tokens' probabilities and its times. */

import { streamed } from "./api.js";
import { duration, grouped, make } from "./dom.js";

const LEAST_MS = 5; // between first and last token; tokens that arrive together have no rate
const CLASSES = [0.9, 0.5, 0.2, 0.05]; // lower bounds of the probability classes p0 to p3

/** Returns the class of a token's probability, 0 (likely) to 4. */
export function classOf(logprob) {
  const at = CLASSES.findIndex((bound) => Math.exp(logprob) >= bound);
  return at < 0 ? CLASSES.length : at;
}

/** Returns [{text, logprob, top}] of a choice, for completions and for chat. */
function tokensOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) {
    return [];
  }
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token,
      logprob: each.logprob,
      top: each.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((text, at) => ({
    text,
    logprob: logprobs.token_logprobs[at],
    top: Object.entries(logprobs.top_logprobs?.[at] ?? {}),
  }));
}

/** Says where two answers differ. */
export function difference(one, two) {
  if (one === two) {
    return "Both answers have the same text.";
  }
  let at = 0;
  while (at < Math.min(one.length, two.length) && one[at] === two[at]) {
    at += 1;
  }
  return `The answers differ from character ${at + 1} on.`;
}

export class Answer {
  constructor(pane) {
    this.pane = pane;
    this.onChoose = null; // (textBefore, alternative), when an alternative of a token is chosen
    this.output = pane.querySelector(".output");
    this.facts = pane.querySelector(".facts");
    this.verdict = pane.querySelector(".verdict");
    this.output.addEventListener("keydown", (event) => this.#key(event));
    this.output.addEventListener("click", (event) => this.#open(event.target.closest(".token")));
    this.clear();
  }

  clear() {
    this.text = "";
    this.tokens = [];
    this.rope = null;
    this.usage = null;
    this.reason = null;
    this.firstSeconds = null;
    this.tokenSeconds = null;
    this.output.replaceChildren(document.createTextNode(""));
    this.facts.textContent = "";
    this.verdict.textContent = "";
    this.verdict.className = "verdict";
  }

  /** Streams the answer of a request. `onProgress(event)` is called while the prompt is read. */
  async run({ path, body }, signal, onProgress) {
    this.clear();
    const sent = performance.now();
    let first = null;
    let last = sent;
    let numEvents = 0;
    const request = {
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
    };
    for await (const event of streamed(path, request, signal)) {
      if (event.prompt_progress) {
        onProgress?.(event.prompt_progress);
      }
      this.usage = event.usage ?? this.usage;
      const choice = event.choices[0];
      if (!choice) {
        continue;
      }
      this.rope = choice.rope ?? this.rope;
      this.reason = choice.finish_reason ?? this.reason;
      const piece = choice.text ?? choice.delta?.content ?? "";
      const tokens = tokensOf(choice);
      if (piece || tokens.length) {
        last = performance.now();
        first ??= last;
        numEvents += 1;
        this.#append(piece, tokens);
      }
    }
    if (first !== null) {
      this.firstSeconds = (first - sent) / 1000;
      const following = (this.usage?.completion_tokens ?? numEvents) - 1;
      const isTimed = following > 0 && last - first >= LEAST_MS;
      this.tokenSeconds = isTimed ? (last - first) / 1000 / following : null;
    }
    this.#state();
  }

  #append(piece, tokens) {
    this.text += piece;
    if (!tokens.length) {
      if (this.output.lastChild?.nodeType !== Node.TEXT_NODE) {
        this.output.append("");
      }
      this.output.lastChild.appendData(piece);
      return;
    }
    for (const token of tokens) {
      const level = classOf(token.logprob);
      const span = make("span", { className: `token p${level}`, tabIndex: -1 }, token.text);
      span.dataset.at = this.tokens.length;
      if (!this.tokens.length) {
        span.tabIndex = 0;
      }
      this.tokens.push(token);
      this.output.append(span);
    }
  }

  #state() {
    const parts = [];
    if (this.rope) {
      parts.push(`${this.rope.rope_type} ${this.rope.factor}x`);
      parts.push(this.rope.beyond_trained_length ? "beyond the trained length" : "");
    }
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${grouped(this.usage.prompt_tokens)} + ${this.usage.completion_tokens} tokens`);
      parts.push(cached ? `${grouped(cached)} from the cache` : "");
    }
    if (this.firstSeconds !== null) {
      parts.push(`first token ${duration(this.firstSeconds)}`);
    }
    if (this.tokenSeconds !== null) {
      parts.push(`${duration(this.tokenSeconds)} a token`);
    }
    if (this.reason) {
      parts.push(`ended by ${this.rope?.ended_by ?? this.reason}`);
    }
    this.facts.textContent = parts.filter(Boolean).join(" · ");
  }

  /** Says whether the answer has the expected text. */
  judge(expected) {
    const isFound = this.text.includes(expected);
    this.verdict.textContent = isFound ? "✓ found" : "✗ lost";
    this.verdict.className = isFound ? "verdict found" : "verdict lost";
  }

  #key(event) {
    const token = event.target.closest(".token");
    if (!token) {
      return;
    }
    const next = { ArrowRight: token.nextSibling, ArrowLeft: token.previousSibling }[event.key];
    if (next?.classList) {
      event.preventDefault();
      token.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.#open(token);
    }
  }

  /** Opens the dialog with a token's alternatives. */
  #open(element) {
    if (!element) {
      return;
    }
    const at = Number(element.dataset.at);
    const before = this.tokens.slice(0, at).map((token) => token.text).join("");
    const dialog = document.getElementById("alternatives");
    const list = dialog.querySelector("ul");
    const token = this.tokens[at];
    const shown = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    dialog.querySelector("p").textContent = `${JSON.stringify(token.text)} ${shown(token.logprob)}`;
    list.replaceChildren(
      ...token.top.map(([text, logprob]) => {
        const label = `${JSON.stringify(text)} ${shown(logprob)}`;
        const button = make("button", { type: "button" }, label);
        button.addEventListener("click", () => {
          dialog.close();
          this.onChoose(before, text);
        });
        return make("li", {}, button);
      }),
    );
    dialog.addEventListener("close", () => element.focus(), { once: true });
    dialog.showModal();
  }
}
