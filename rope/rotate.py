"""Turning vectors, and the order their dimensions are in.

Shapes: D = head dimensions, P = rotated pairs; `...` = any leading dimensions.
"""

import torch
from torch import Tensor

from rope.angles import Angles


def half_split_from_interleaved(x_D: Tensor, rotary_dim: int) -> Tensor:
    """Reorder [..., D] so that pair i is (i, i + P) instead of (2i, 2i + 1).

    A dot product does not care about the order of dimensions, so a query and a key reordered
    alike score as before, and everything behind this function knows one order only.
    """
    rotary_D = x_D[..., :rotary_dim]
    paired_P2 = rotary_D.reshape(*x_D.shape[:-1], rotary_dim // 2, 2)
    split_D = paired_P2.transpose(-1, -2).flatten(-2)
    return torch.cat((split_D, x_D[..., rotary_dim:]), dim=-1)


def rotate(x_D: Tensor, angles: Angles) -> Tensor:
    """Turn the first 2P dimensions of [..., D] (half-split) by angles [..., P]; keep the rest.

    The attention factor is intentionally not applied here: it belongs to the read.
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
    """Qwen-1's `use_logn_attn`: max(1, ln(n) / ln(L)), n the 1-based position; float32 [T].

    It multiplies the whole query, not only its rotary part.
    """
    scale_T = (positions_T.double() + 1).log() / torch.tensor(float(logn_len)).double().log()
    return scale_T.clamp(min=1.0).float()
