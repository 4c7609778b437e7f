"""The basic types of this package: the rotated part of a head, its table and the scaling.

Shapes: P = rotated pairs, fastest first.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The part of a head that rotates."""

    rotary_dim: int  # dimensions that rotate, two per pair; may be fewer than the head has
    rope_theta: float  # the base; pair i rotates theta ** (-2i / rotary_dim) radians per token
    # The first pairs rotate, and the rest stand still (`proportional`, Gemma 4); None: all rotate.
    num_turning: int | None = None

    @property
    def num_pairs(self) -> int:
        """Return P, the number of pairs in the table."""
        return self.rotary_dim // 2

    @property
    def num_rotating(self) -> int:
        return self.num_pairs if self.num_turning is None else self.num_turning

    def tokens_per_radian_P(self) -> "Tensor":
        """Return the tokens in which each pair rotates by one radian, float32 [P].

        A pair that stands still has infinity, so every scaling gives it the frequency 0. The
        expression is the one in transformers, so every table built from it has the same bits.
        """
        import torch  # noqa: PLC0415  # planning needs no tables

        # The power is taken of these pairs only, because a vector's end has other last bits.
        exponents = torch.arange(0, 2 * self.num_rotating, 2, dtype=torch.float32)
        tokens = self.rope_theta ** (exponents / self.rotary_dim)
        if self.num_turning is None:
            return tokens
        return torch.cat((tokens, tokens.new_full((self.num_pairs - len(tokens),), torch.inf)))


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """One table: how fast each pair rotates, and the factor of cos and sin."""

    inv_freq_P: "Tensor"  # float32 [P], radians per token
    attention_factor: float  # multiplies cos and sin, so rotary logits grow by its square


def factor_at(factor: float, ceiling: int, native_len: int) -> float:
    """Return ceiling / L, or the method's own factor if the ceiling is that factor times L.

    A fractional factor times L is rounded to whole tokens, so ceiling / L would change the factor.
    """
    return factor if round(native_len * factor) == ceiling else ceiling / native_len


class Scaling(Protocol):
    """One way to change the native frequencies; a frozen dataclass, so profiles can be hashed."""

    rope_type: ClassVar[str]

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table; it depends on the fields and `rotary` only, never on a batch."""

    def at(self, ceiling: int, native_len: int) -> Self:
        """Return the same method for sequences of up to `ceiling` tokens (design: a tier sets it).

        `native_len` is L, the length the frequencies were trained for.
        """


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The frequencies of a RoPE model without scaling (RoFormer, arXiv 2104.09864)."""

    rope_type: ClassVar[str] = "default"

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table of theta ** (-2i / d)."""
        return Frequencies(1.0 / rotary.tokens_per_radian_P(), 1.0)

    def at(self, ceiling: int, native_len: int) -> Self:  # noqa: ARG002  # same at any length
        """Return itself, because it has no field to set."""
        return self
