"""Position interpolation: every pair rotates slower by the same factor (arXiv 2306.15595)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rope.frequencies import Frequencies, Rotary, factor_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Scaling that divides every frequency by `factor`, which equals dividing positions by it."""

    rope_type: ClassVar[str] = "linear"
    factor: float  # served context / trained context

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table, equal to transformers' `linear` to the bit."""
        return Frequencies(1.0 / rotary.tokens_per_radian_P() / self.factor, 1.0)

    def at(self, ceiling: int, native_len: int) -> Self:
        return replace(self, factor=factor_at(self.factor, ceiling, native_len))
