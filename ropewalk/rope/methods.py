"""The scaling methods: frozen dataclasses that make the table of a head's rotated part.

Shapes: P = rotated pairs, fastest first.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor

SWITCHING = ("longrope", "dynamic")  # their checkpoints change the table by length themselves


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


def _temperature(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 m ln(s) + 1 (YaRN paper, equation 22), or 1 if nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Scaling that keeps the pairs with many rotations in the trained context, and slows the rest.

    The ramp between the two is linear in the pair's index, as in the authors' code and every
    engine. In the paper's equation 18 it is linear in the number of rotations.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float  # served context / trained context
    original_max_position_embeddings: int  # L, tokens
    beta_fast: float = 32.0  # rotations over L: pairs with at least this many are kept
    beta_slow: float = 1.0  # pairs with at most this many are divided by factor
    attention_factor: float | None = None  # None: from factor and the two mscales
    mscale: float | None = None  # DeepSeek's pair; used only when both are set and non-zero
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ramp's two ends outwards to whole pairs

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table, equal to transformers' `yarn` to the bit."""
        keep_P = 1 - self._ramp_P(rotary)
        tokens_per_radian_P = rotary.tokens_per_radian_P()
        kept_P = 1.0 / tokens_per_radian_P
        interpolated_P = 1.0 / (self.factor * tokens_per_radian_P)
        # This is the reference's order of operations. Algebraically equal forms change cos by up to
        # 7e-3 at position 131,071.
        inv_freq_P = interpolated_P * (1 - keep_P) + kept_P * keep_P
        return Frequencies(inv_freq_P, self._attention_factor())

    def at(self, ceiling: int, native_len: int) -> Self:
        """Return this method with factor = ceiling / L; an explicit attention factor stays."""
        factor = factor_at(self.factor, ceiling, native_len)
        return replace(self, factor=factor, original_max_position_embeddings=native_len)

    def _ramp_P(self, rotary: Rotary) -> "Tensor":
        import torch  # noqa: PLC0415  # planning needs no tables

        low = self._pair_turning(rotary, self.beta_fast)
        high = self._pair_turning(rotary, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.rotary_dim - 1)
        if low == high:
            high += 0.001  # avoids a division by zero, as the reference does
        index_P = torch.arange(rotary.num_pairs, dtype=torch.float32)
        return torch.clamp((index_P - low) / (high - low), 0, 1)

    def _pair_turning(self, rotary: Rotary, turns: float) -> float:
        """Return the fractional index of the pair that rotates `turns` times over L tokens."""
        trained = self.original_max_position_embeddings
        pair = rotary.rotary_dim * math.log(trained / (turns * 2 * math.pi))
        return pair / (2 * math.log(rotary.rope_theta))

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            numerator = _temperature(self.factor, self.mscale)
            return numerator / _temperature(self.factor, self.mscale_all_dim)
        return _temperature(self.factor)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Scaling that keeps short wavelengths, divides long ones by factor, and blends in between.

    It equals the YaRN paper's NTK-by-parts with alpha = low_freq_factor and beta =
    high_freq_factor, without the temperature. The tests measure this.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    original_max_position_embeddings: int  # L, tokens
    low_freq_factor: float = 1.0  # wavelengths above L / this are divided by factor
    high_freq_factor: float = 4.0  # wavelengths below L / this are kept

    def frequencies(self, rotary: Rotary) -> Frequencies:
        """Return the table, equal to transformers' `llama3` to the bit."""
        import torch  # noqa: PLC0415  # planning needs no tables

        trained = self.original_max_position_embeddings
        longest_kept = trained / self.high_freq_factor
        shortest_divided = trained / self.low_freq_factor
        inv_freq_P = 1.0 / rotary.tokens_per_radian_P()
        wavelength_P = 2 * math.pi / inv_freq_P
        scaled_P = torch.where(
            wavelength_P > shortest_divided, inv_freq_P / self.factor, inv_freq_P
        )
        smooth_P = trained / wavelength_P - self.low_freq_factor
        smooth_P = smooth_P / (self.high_freq_factor - self.low_freq_factor)
        blended_P = (1 - smooth_P) * scaled_P / self.factor + smooth_P * scaled_P
        between_P = (wavelength_P >= longest_kept) & (wavelength_P <= shortest_divided)
        return Frequencies(torch.where(between_P, blended_P, scaled_P), 1.0)

    def at(self, ceiling: int, native_len: int) -> Self:
        factor = factor_at(self.factor, ceiling, native_len)
        return replace(self, factor=factor, original_max_position_embeddings=native_len)


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
    """NTK-aware scaling: a larger base, so fast pairs keep their speed and slow ones stretch.

    The base is multiplied by factor ** (d / (d - 2)), as in the YaRN paper (arXiv 2309.00071),
    equation 16. vLLM's `ntk` is another formula, which is not here.
    """

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
