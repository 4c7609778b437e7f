"""Rotation of vectors, and the order of their dimensions.

Shapes: D = head dimensions, P = rotated pairs; `...` = any leading dimensions.
"""

import torch
from torch import Tensor

from rope.angles import Angles


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
