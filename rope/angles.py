"""Cosines and sines of position x frequency, with errors near 2e-6 at any position.

The product of a large position and a frequency in float32 loses the angle. The cosine's error is
1e-3 at 32 k and 3e-2 at 1 M. Here a position is a page's start plus an offset inside it. The
start's angle is computed in float64, the offset's is small, and the addition formula combines them.

Shapes: P = rotated pairs, N = pages, O = offsets in a page, T = positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """A cosine and a sine of the same shape."""

    cos: Tensor
    sin: Tensor

    def plus(self, other: "Angles") -> "Angles":
        """Return the angles of the sums: cos(a + b), sin(a + b)."""
        return Angles(
            self.cos * other.cos - self.sin * other.sin,
            self.sin * other.cos + self.cos * other.sin,
        )


def _angles(positions: Tensor, inv_freq_P: Tensor) -> Angles:
    angle = torch.outer(positions.double(), inv_freq_P.double()) % (2 * torch.pi)
    return Angles(angle.cos().float(), angle.sin().float())


def page_start_angles(inv_freq_P: Tensor, num_pages: int, page_size: int) -> Angles:
    """Return the angles of every page's first position, float32 [N, P]."""
    return _angles(torch.arange(num_pages, device=inv_freq_P.device) * page_size, inv_freq_P)


def offset_angles(inv_freq_P: Tensor, page_size: int) -> Angles:
    """Return the angles of every offset inside a page, float32 [O, P]; the same for all pages."""
    return _angles(torch.arange(page_size, device=inv_freq_P.device), inv_freq_P)


def position_angles(starts: Angles, offsets: Angles, positions_T: Tensor) -> Angles:
    """Return the angles at absolute positions, float32 [T, P], from the two small tables."""
    page_size = offsets.cos.shape[0]
    pages_T, offsets_T = positions_T // page_size, positions_T % page_size
    return Angles(starts.cos[pages_T], starts.sin[pages_T]).plus(
        Angles(offsets.cos[offsets_T], offsets.sin[offsets_T])
    )
