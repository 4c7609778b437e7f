"""The engine's limits, fixed at start."""

from collections.abc import Iterator
from dataclasses import dataclass

from model_runtime.errors import RequestError
from model_runtime.request import SamplingParams

DEFAULT_DRAFT_TOKENS = 15
# The most rows of a step with drafts on a GPU: reading the weights takes most of its time.
MOST_DRAFT_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """The sampling limits of one request, checked before tokenising and by the engine."""

    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_logprobs: int = 20

    def exceeded(self, params: SamplingParams) -> Iterator[tuple[str, int, str, int]]:
        """Yield each exceeded limit: the field, the limit, its unit and the given number."""
        longest_stop = max(map(len, params.stop), default=0)
        logprobs = max(params.logprobs or 0, params.prompt_logprobs or 0)
        for param, most, unit, given in (
            ("stop", self.max_stop_strings, "strings", len(params.stop)),
            ("stop", self.max_stop_chars, "characters each", longest_stop),
            ("stop_token_ids", self.max_stop_token_ids, "tokens", len(params.stop_token_ids)),
            ("logit_bias", self.max_logit_bias, "tokens", len(params.logit_bias)),
            ("logprobs", self.max_logprobs, "alternatives", logprobs),
        ):
            if given > most:
                yield param, most, unit, given

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError, which names field, limit and value, if a limit is exceeded."""
        for exceeded in self.exceeded(params):
            raise too_many(*exceeded)


def too_many(param: str, most: int, unit: str, given: int) -> RequestError:
    return RequestError(f"`{param}` must be at most {most} {unit}. Given: {given}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of the scheduler and the cache, with units in their names."""

    kv_cache_tokens: int  # positions that all running sequences share
    max_model_len: int  # positions of the longest sequence
    page_size: int = 64  # positions in a page
    max_num_seqs: int = 32  # sequences in one step
    max_num_batched_tokens: int = 512  # tokens in one step: decodes plus prefill chunks
    step_target_s: float | None = None  # target of a step with prefill; None: no target
    max_num_logit_rows: int = 256  # prompt positions with logprobs in one step
    num_rope_tables: int = 1  # profiles that requests may have; their tables get memory at start
    # Tokens a sequence; 0: no speculation; None: the default if no bit can change, else 0.
    max_draft_tokens: int | None = 0
    enforce_eager: bool = False  # on a GPU: no CUDA graphs of decode steps
    max_queued_requests: int = 256  # requests waiting to start
    max_queued_prompt_tokens: int | None = None  # tokens of their prompts; None: no limit
    limits: SamplingLimits = SamplingLimits()

    @property
    def num_pages(self) -> int:
        """Whole pages that the cache holds."""
        return self.kv_cache_tokens // self.page_size

    @property
    def max_decode_rows(self) -> int:
        """Return the most rows of a decode step on a GPU: all sequences, or few with drafts."""
        num_drafted = self.max_num_seqs * (1 + (self.max_draft_tokens or 0))
        return max(
            self.max_num_seqs, min(num_drafted, MOST_DRAFT_ROWS, self.max_num_batched_tokens)
        )
