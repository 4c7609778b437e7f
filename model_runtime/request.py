"""What is asked of the engine, and what it answers."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from model_runtime.deployment import Placement
from rope import Tier

MAX_LOGPROBS = 20  # alternatives per token; always computed, so that ties fall the same way

if TYPE_CHECKING:  # it brings transformers with it, and settings import this file
    from model_runtime.text.grammar import Grammar


class FinishReason(enum.StrEnum):
    """Why a sequence ended; `stop` and `length` are OpenAI's words."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client went away
    ERROR = "error"  # a step failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to end."""

    max_tokens: int = 16  # 0: compute the prompt only
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0  # keep the most likely tokens that together reach this probability
    top_k: int = 0  # keep this many; 0: all
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest
    seed: int = 0  # same seed, same request: same tokens in any batch
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen, prompt included
    presence_penalty: float = 0.0  # subtracted from logits of tokens generated before
    frequency_penalty: float = 0.0  # subtracted once for each time a token was generated
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    stop: tuple[str, ...] = ()  # end before any of these
    stop_token_ids: tuple[int, ...] = ()  # end at any of these
    ignore_eos: bool = False  # go on past the model's own end tokens
    min_tokens: int = 0  # no end token, the model's or the request's, before so many
    logprobs: int | None = None  # report this many alternatives per generated token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_from: int = 1  # position of the first of them; those before are left out


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and all that was decided about it at admission."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    placement: Placement  # deployment, tier, policy
    cache_salt: str = ""  # requests with another salt never share cached prefixes
    wants_progress: bool = False  # an output after every chunk of the prompt
    grammar: "Grammar | None" = None  # what its answer has to be

    @property
    def num_positions(self) -> int:
        """Positions it will rotate: the last token generated is never read back."""
        return len(self.prompt_ids) + max(0, self.sampling.max_tokens - 1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural-log probability under the raw logits, beside the likeliest others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt is; all counts in tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int  # found in the prefix cache
    num_computed_tokens: int  # done, the cached ones included
    seconds: float  # since the request left the queue


class Output(NamedTuple):
    """What one step added to a request. A tuple: made for every token, a dataclass takes longer."""

    text: str = ""  # whole characters only; text that may begin a stop string is held back
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token id, when asked for
    # Once, before the first token: one per prompt token; the first has no predecessor, so None.
    # With prompt_logprobs_from, None and then one per token from there on.
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens that were found in the cache
    tier: Tier | None = None  # with the finish_reason: the tier it ended on
    num_rescales: int = 0  # how often its table changed so far
    progress: PromptProgress | None = None  # in an output of its own, where it was asked for
    error: str | None = None  # for the log and the client, with FinishReason.ERROR


OnOutput = Callable[[Output], None]  # called on the engine's thread; must not block
