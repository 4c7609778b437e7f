"""The requests to the engine and its outputs."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ropewalk.model_runtime.deployments.deployment import TierChoice
from ropewalk.rope import Tier

MAX_LOGPROBS = 20  # alternatives per token; always computed, so that ties are resolved equally

if TYPE_CHECKING:  # it imports transformers, and settings import this file
    from ropewalk.model_runtime.text.grammar import Grammar


class FinishReason(enum.StrEnum):
    """The reason a sequence ended; `stop` and `length` are OpenAI's names."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens reached, or the time over after the first token
    TIMEOUT = "timeout"  # the time was over before the first token
    ABORT = "abort"  # the client disconnected
    ERROR = "error"  # a step failed
    REFUSED = "refused"  # the grammar that the client sent cannot continue


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of sampling and of the answer's end."""

    max_tokens: int = 16  # 0: compute the prompt only
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0  # keep the most likely tokens that together reach this probability
    top_k: int = 0  # keep this many; 0: all
    min_p: float = 0.0  # drop tokens below this fraction of the max probability
    seed: int = 0  # same seed, same request: same tokens in any batch
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen, prompt included
    presence_penalty: float = 0.0  # subtracted from logits of tokens generated before
    frequency_penalty: float = 0.0  # subtracted once per earlier generation of a token
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    # A bit for each token that may come, lowest first; None: all. Recorded runs of eval have the
    # repr of what they ask for as their keys, and never set this.
    allowed: bytes | None = field(default=None, repr=False)
    stop: tuple[str, ...] = ()  # end before any of these strings
    stop_token_ids: tuple[int, ...] = ()  # end at any of these tokens
    # The stop strings that stay in the text, as end tokens then do; None: neither stays.
    shown_stop: frozenset[str] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that must not follow each other
    ignore_eos: bool = False  # continue after the model's own end tokens
    min_tokens: int = 0  # no end token of model or request before this count
    logprobs: int | None = None  # report this many alternatives per generated token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_from: int = 1  # position of the first reported one


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, with all values fixed at admission."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    tier_choice: TierChoice  # deployment, tier, policy
    cache_salt: str = ""  # requests with another salt never share cached prefixes
    wants_progress: bool = False  # report progress after every prompt chunk
    grammar: "Grammar | None" = None  # the grammar of its answer
    shown_ids: frozenset[int] = frozenset()  # special tokens that its text contains
    prediction_ids: tuple[int, ...] = ()  # the answer that the client expects; for drafts only
    priority: int = 0  # a lower number starts earlier, and is preempted later
    wants_timings: bool = False  # report the times of its parts with each output
    deadline: float | None = None  # time.monotonic() at which its time is over

    @property
    def num_positions(self) -> int:
        return self.positions_with(self.sampling.max_tokens)

    def positions_with(self, num_generated: int) -> int:
        """Return its positions with so many answer tokens; the last one is never read back."""
        return len(self.prompt_ids) + max(0, num_generated - 1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural-log probability of a token under the raw logits, with the top tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The prefill progress of a prompt; all counts in tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int  # found in the prefix cache
    num_computed_tokens: int  # computed, including the cached ones
    seconds: float  # since the request left the queue


class Timings(NamedTuple):
    """The times of a request's parts so far, in seconds."""

    prefill_s: float  # from its first step to its first token
    decode_s: float  # from its first token to its newest


class Output(NamedTuple):
    """The output of one step for a request. A NamedTuple is faster to create per token."""

    text: str = ""  # whole characters only; text that may begin a stop string is held back
    token_ids: tuple[int, ...] = ()  # generated by this step
    # If requested, one per token. Those of text that is held back come with that text.
    logprobs: tuple[TokenLogprob, ...] = ()
    # With the finish_reason: those of tokens that a stop string removed from the text.
    cut_logprobs: tuple[TokenLogprob, ...] = ()
    # Once, before the first token: one per prompt token. The first is None: it has no predecessor.
    # With prompt_logprobs_from: None, and then one per token from that position.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # with FinishReason.STOP: the one that ended the text
    num_cached_tokens: int = 0  # prompt tokens that were found in the cache
    tier: Tier | None = None  # the one in force; None only before the engine delivers it
    num_rescales: int = 0  # number of rotation table changes so far
    progress: PromptProgress | None = None  # in a separate output, if requested
    error: str | None = None  # for the log and the client, with FinishReason.ERROR or REFUSED
    # With the finish_reason: tokens of drafts that were chosen, and those that were not.
    drafts: tuple[int, int] = (0, 0)
    timings: Timings | None = None  # if requested


OnOutput = Callable[[Output], None]  # called on the engine's thread; must not block
