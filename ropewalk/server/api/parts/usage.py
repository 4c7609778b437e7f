"""The head of answers, their counts and their times."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from ropewalk.model_runtime.request import PromptProgress, Timings
from ropewalk.server.api.strict_body import Body, is_none


class AnswerHead(Body):
    """The beginning of answers of OpenAI's older routes, and of each event of their streams."""

    id: str = Field(examples=["cmpl-4f2a90c1d3b74f2a90c1d3b74f2a90c1"])
    """The id of the answer."""
    object: str = Field(examples=["text_completion"])
    """The kind of the object."""
    created: int = Field(examples=[1764288000])
    """Unix time of the request."""
    model: str = Field(examples=["ropewalk-demo"])
    """The served name."""


class CompletionTokensDetails(Body):
    """The parts of the answers."""

    reasoning_tokens: int | None = Field(None, exclude_if=is_none, examples=[120])
    """Tokens of the reasoning. Absent if the model's reasoning is not separated from its text."""
    accepted_prediction_tokens: int | None = Field(None, exclude_if=is_none, examples=[40])
    """Tokens of drafts that were chosen (docs/design/speculation.md). Absent without
    `prediction`."""
    rejected_prediction_tokens: int | None = Field(None, exclude_if=is_none, examples=[8])
    """Tokens of drafts that were not chosen. Absent without `prediction`."""


class PromptTokensDetails(Body):
    """The source of the prompt's keys and values."""

    cached_tokens: int = Field(examples=[64])
    """Tokens of the prompt that were found in the prefix cache."""


class Usage(Body):
    """Token counts; a prompt counts once, however many answers it has."""

    prompt_tokens: int = Field(examples=[80])
    """Tokens of the prompts."""
    completion_tokens: int = Field(examples=[160])
    """Generated tokens, end tokens and those of stop strings included."""
    total_tokens: int = Field(examples=[240])
    """Both together."""
    prompt_tokens_details: PromptTokensDetails
    """Where the prompt's keys and values come from."""
    completion_tokens_details: CompletionTokensDetails | None = Field(None, exclude_if=is_none)
    """The parts of the answers. Absent if there is nothing to tell."""


class PromptProgressAnswer(Body):
    """How far a long prompt is, as llama.cpp tells it."""

    index: int = Field(examples=[0])
    """Index of the prompt in the request."""
    total: int = Field(examples=[30000])
    """Tokens of the prompt."""
    cache: int = Field(examples=[1024])
    """Tokens of the prompt that were found in the prefix cache."""
    processed: int = Field(examples=[9216])
    """Tokens done, the cached ones included. The number may fall if the request is preempted and
    computed again."""
    time_ms: float = Field(examples=[812.5])
    """Milliseconds since the prompt was started."""

    @classmethod
    def of(cls, index: int, progress: PromptProgress) -> Self:
        """Build it from the engine's numbers."""
        return cls(
            index=index,
            total=progress.num_prompt_tokens,
            cache=progress.num_cached_tokens,
            processed=progress.num_computed_tokens,
            time_ms=round(progress.seconds * 1000, 3),
        )


class TimingsAnswer(Body):
    """Tokens and milliseconds of the prompt and of the answer, under llama.cpp's names."""

    cache_n: int = Field(examples=[64])
    """Tokens of the prompt that were found in the prefix cache."""
    prompt_n: int = Field(examples=[16])
    """The other tokens of the prompt, which were computed."""
    prompt_ms: float = Field(examples=[21.5])
    """Milliseconds from the first step to the first token."""
    prompt_per_token_ms: float | None = Field(examples=[1.344])
    """Milliseconds for each computed token of the prompt, or null if there is no time to divide."""
    prompt_per_second: float | None = Field(examples=[744.186])
    """Computed tokens of the prompt in a second, or null if there is no time to divide."""
    predicted_n: int = Field(examples=[160])
    """Tokens of the answer."""
    predicted_ms: float = Field(examples=[1590.0])
    """Milliseconds from the first token of the answer to the newest."""
    predicted_per_token_ms: float | None = Field(examples=[10.0])
    """Milliseconds for each token of the answer but the first, or null."""
    predicted_per_second: float | None = Field(examples=[100.0])
    """Tokens of the answer in a second without the first one, or null."""

    @classmethod
    def of(cls, times: Timings, num_cached: int, num_prompt: int, num_generated: int) -> Self:
        """Build it from the engine's times and the counts of tokens."""
        num_computed = num_prompt - num_cached
        return cls(
            cache_n=num_cached,
            prompt_n=num_computed,
            predicted_n=num_generated,
            **_rates("prompt", num_computed, times.prefill_s),
            # The first token belongs to the prompt's time.
            **_rates("predicted", num_generated, times.decode_s, num_timed=num_generated - 1),
        )


def _rates(name: str, num: int, seconds: float, num_timed: int | None = None) -> Mapping[str, Any]:
    """Return the milliseconds, and both rates where there are any."""
    timed = num if num_timed is None else num_timed
    has_rate = timed > 0 and seconds > 0
    return {
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / timed, 3) if has_rate else None,
        f"{name}_per_second": round(timed / seconds, 3) if has_rate else None,
    }
