"""NTK-aware scaling: a larger base, so fast pairs keep their speed and slow ones stretch.

The static form is bloc97's, as in the YaRN paper (arXiv 2309.00071), equation 16. The dynamic form
is the one in transformers, with a base that follows the sequence length.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rope.frequencies import Frequencies, Rotary, Unscaled, factor_at


def _with_base(rotary: Rotary, rope_theta: float) -> Frequencies:
    return Unscaled().frequencies(replace(rotary, rope_theta=rope_theta))


def _base_exponent(rotary: Rotary) -> float:
    """Return the power of `factor` by which the slowest pair rotates exactly `factor` times slower.

    It is d / (d - 2) if all pairs rotate, in the operations of transformers.
    """
    if rotary.num_turning is None:
        return rotary.rotary_dim / (rotary.rotary_dim - 2)
    return rotary.rotary_dim / (2 * rotary.num_turning - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NTK:
    """Base times factor ** (d / (d - 2)). vLLM's `ntk` is another formula (not included here)."""

    rope_type: ClassVar[str] = "ntk"
    factor: float  # how many times slower the slowest pair rotates

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table; transformers has none, so a test compares it with equation 16."""
        base = rotary.rope_theta * self.factor ** _base_exponent(rotary)
        return _with_base(rotary, base)

    def at(self, ceiling: int, native_len: int) -> Self:
        return replace(self, factor=factor_at(self.factor, ceiling, native_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK:
    """A base that grows with the length above L: base * (f l / L - (f - 1)) ** (d / (d - 2)).

    `num_tokens` is l. It is a field, because the server sets it to a tier's ceiling, not to each
    sequence's length. So the table equals Hugging Face's for a sequence of exactly that length. For
    a shorter sequence on the same tier, it rotates a little slower than Hugging Face's.
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float  # f, Hugging Face's own field; a tier keeps it
    original_max_position_embeddings: int  # L
    num_tokens: int  # l

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table, equal to a new transformers `dynamic` module at l tokens to the bit."""
        trained = self.original_max_position_embeddings
        num_tokens = max(self.num_tokens, trained)
        stretch = (self.factor * num_tokens / trained) - (self.factor - 1)
        return _with_base(rotary, rotary.rope_theta * stretch ** _base_exponent(rotary))

    def at(self, ceiling: int, native_len: int) -> Self:
        """Return this method with num_tokens = ceiling; the factor stays."""
        return replace(self, num_tokens=ceiling, original_max_position_embeddings=native_len)
