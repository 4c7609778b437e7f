"""The vocabulary of this package: what is rotated, and by which table.

Shapes: P = rotated pairs, fastest first.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The part of a head that rotates."""

    rotary_dim: int  # dimensions that rotate, two per pair; may be fewer than the head has
    rope_theta: float  # the base; pair i turns theta ** (-2i / rotary_dim) radians per token

    @property
    def num_pairs(self) -> int:
        """P, the number of planes that rotate."""
        return self.rotary_dim // 2

    def tokens_per_radian_P(self) -> Tensor:
        """Tokens that it takes each pair to turn by one radian, float32 [P].

        Spelled as transformers spells it, so that every table built from it has the same bits.
        """
        exponent_P = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return self.rope_theta**exponent_P


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """One table: how fast each pair turns, and how much longer cos and sin are made."""

    inv_freq_P: Tensor  # float32 [P], radians per token
    attention_factor: float  # multiplies cos and sin, so rotary logits grow by its square


def factor_at(factor: float, ceiling: int, native_len: int) -> float:
    """ceiling / L; a method's own factor where the ceiling is what that factor reaches.

    A fractional factor times L is rounded to whole tokens, and must not come back changed.
    """
    return factor if round(native_len * factor) == ceiling else ceiling / native_len


class Scaling(Protocol):
    """One way to change the native frequencies; a frozen dataclass, so profiles can be hashed."""

    rope_type: ClassVar[str]

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """The table; depends on nothing but the fields and `rotary`, never on a batch."""

    def at(self, ceiling: int, native_len: int) -> Self:
        """The same method, set for sequences of up to `ceiling` tokens (design: what a tier sets).

        `native_len` is L, the length the frequencies were trained for.
        """


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The frequencies a RoPE model is born with (RoFormer, arXiv 2104.09864)."""

    rope_type: ClassVar[str] = "default"

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """theta ** (-2i / d)."""
        return Frequencies(1.0 / rotary.tokens_per_radian_P(), 1.0)

    def at(self, ceiling: int, native_len: int) -> Self:  # noqa: ARG002  # same at any length
        """Itself: nothing to set."""
        return self
