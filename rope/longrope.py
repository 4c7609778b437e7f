"""LongRoPE: two searched lists of divisors, one up to L and one beyond (arXiv 2402.13753)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rope.frequencies import Frequencies, Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope:
    """Scaling that divides pair i by its own divisor, from the short list up to L, else the long.

    The attention factor is the same for both lists. It follows the model's full length, as in
    transformers and vLLM.
    """

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]  # one divisor a pair
    long_factor: tuple[float, ...]
    factor: float  # full length / L
    original_max_position_embeddings: int  # L, tokens
    attention_factor: float | None = None  # None: sqrt(1 + ln(factor) / ln(L))
    num_tokens: int  # the length served; above L the long list applies

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table, equal to transformers' `longrope` for `num_tokens`, to the bit."""
        import torch  # noqa: PLC0415  # planning needs no tables

        is_long = self.num_tokens > self.original_max_position_embeddings
        divisors_P = torch.tensor(self.long_factor if is_long else self.short_factor)
        inv_freq_P = 1.0 / (divisors_P * rotary.tokens_per_radian_P())
        return Frequencies(inv_freq_P, self._attention_factor())

    def at(self, ceiling: int, native_len: int) -> Self:
        """Return this method with the list for the ceiling; factor and attention factor stay."""
        return replace(self, num_tokens=ceiling, original_max_position_embeddings=native_len)

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        ratio = math.log(self.factor) / math.log(self.original_max_position_embeddings)
        return math.sqrt(1 + ratio)
