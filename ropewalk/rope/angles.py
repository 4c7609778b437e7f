"""Angles of positions, with errors near 2e-6 at any position, and rotation of vectors by them.

The product of a large position and a frequency in float32 loses the angle. The cosine's error is
1e-3 at 32 k and 3e-2 at 1 M. Here a position is a page's start plus an offset inside it. The
start's angle is computed in float64, the offset's is small, and the addition formula combines them.

Shapes: P = rotated pairs, N = pages, O = offsets in a page, T = positions, D = head dimensions;
`...` = any leading dimensions.
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


def half_split_from_interleaved(x_D: Tensor, rotary_dim: int) -> Tensor:
    """Reorder [..., D] so that pair i is (i, i + P) instead of (2i, 2i + 1).

    A dot product does not depend on the order of dimensions. So the score stays the same if a query
    and its key are reordered in the same way. All code after this function uses one order only.
    """
    rotary_D = x_D[..., :rotary_dim]
    paired_P2 = rotary_D.reshape(*x_D.shape[:-1], rotary_dim // 2, 2)
    split_D = paired_P2.transpose(-1, -2).flatten(-2)
    return torch.cat((split_D, x_D[..., rotary_dim:]), dim=-1)


def rotate(x_D: Tensor, angles: Angles) -> Tensor:
    """Rotate the first 2P dimensions of [..., D] (half-split) by angles [..., P]; keep the rest.

    The attention factor is intentionally not applied here, because the read applies it.
    """
    num_pairs = angles.cos.shape[-1]
    first_P, second_P = x_D[..., :num_pairs], x_D[..., num_pairs : 2 * num_pairs]
    return torch.cat(
        (
            first_P * angles.cos - second_P * angles.sin,
            second_P * angles.cos + first_P * angles.sin,
            x_D[..., 2 * num_pairs :],
        ),
        dim=-1,
    )


def logn_scale(positions_T: Tensor, logn_len: int) -> Tensor:
    """Return Qwen-1's `use_logn_attn` factor, max(1, ln(n) / ln(L)), float32 [T].

    n is the 1-based position. The factor multiplies the whole query, not only its rotary part.
    """
    scale_T = (positions_T.double() + 1).log() / torch.tensor(float(logn_len)).double().log()
    return scale_T.clamp(min=1.0).float()
