"""NTK-aware scaling: a larger base, so fast pairs keep their speed and slow ones stretch.

Static form: bloc97's, as in YaRN paper (arXiv 2309.00071) equation 16. Dynamic form: the one in
transformers, where the base follows the sequence length.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rope.frequencies import Frequencies, Rotary, Unscaled, factor_at


def _with_base(rotary: Rotary, rope_theta: float) -> Frequencies:
    return Unscaled().frequencies(replace(rotary, rope_theta=rope_theta))


def _base_exponent(rotary: Rotary) -> float:
    """d / (d - 2): makes the slowest pair turn exactly `factor` times slower."""
    return rotary.rotary_dim / (rotary.rotary_dim - 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NTK:
    """Base times factor ** (d / (d - 2)). vLLM's `ntk` is another formula (not built here)."""

    rope_type: ClassVar[str] = "ntk"
    factor: float  # how much slower the slowest pair turns

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """No reference in transformers; the test holds it against equation 16."""
        base = rotary.rope_theta * self.factor ** _base_exponent(rotary)
        return _with_base(rotary, base)

    def at(self, ceiling: int, native_len: int) -> Self:
        """factor := ceiling / L."""
        return replace(self, factor=factor_at(self.factor, ceiling, native_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK:
    """The base grows with the length beyond L: base * (f l / L - (f - 1)) ** (d / (d - 2)).

    `num_tokens` is l. It is a field, not an argument of the moment: the server sets it to a
    tier's ceiling, so the table equals Hugging Face's for a sequence of exactly that length and
    is a little slower than Hugging Face's for a shorter one on the same tier.
    """

    rope_type: ClassVar[str] = "dynamic"
    factor: float  # f, Hugging Face's own field; a tier keeps it
    original_max_position_embeddings: int  # L
    num_tokens: int  # l

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Equal to a fresh transformers `dynamic` module at l tokens, to the bit."""
        trained = self.original_max_position_embeddings
        num_tokens = max(self.num_tokens, trained)
        stretch = (self.factor * num_tokens / trained) - (self.factor - 1)
        return _with_base(rotary, rotary.rope_theta * stretch ** _base_exponent(rotary))

    def at(self, ceiling: int, native_len: int) -> Self:
        """Sequence length := ceiling; the own factor stays."""
        return replace(self, num_tokens=ceiling, original_max_position_embeddings=native_len)
