"""The times of an answer, as llama.cpp tells them."""

from collections.abc import Mapping
from typing import Any, Self

from model_runtime.request import Timings
from server.api.strict_body import Body


class TimingsAnswer(Body):
    """Tokens and milliseconds of the prompt and of the answer."""

    cache_n: int  # tokens of the prompt that were found in the prefix cache
    prompt_n: int  # the others, which were computed
    prompt_ms: float  # from the first step to the first token
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int  # tokens of the answer
    predicted_ms: float  # from the first token to the newest
    predicted_per_token_ms: float | None
    predicted_per_second: float | None

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
