"""YaRN: fast pairs kept, slow pairs interpolated, logits a little hotter (arXiv 2309.00071)."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from rope.frequencies import Frequencies, Rotary, factor_at

if TYPE_CHECKING:
    from torch import Tensor


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
