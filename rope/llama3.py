"""Llama 3.1's scaling: a smooth step between two wavelengths.

It equals the YaRN paper's NTK-by-parts with alpha = low_freq_factor and beta = high_freq_factor,
without the temperature. Others have measured this, and the tests measure it, too.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from rope.frequencies import Frequencies, Rotary, factor_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Scaling that keeps short wavelengths, divides long ones by factor, and blends in between."""

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
