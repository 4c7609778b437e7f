"""A kernel that rotates a step's queries and keys, as a conventional cache does at the write.

This module imports triton.

Shapes: T = flat tokens, H = query heads, K = key heads, D = head dimensions, P = D / 2 pairs.
"""

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.rotate import padded
from ropewalk.rope.angles import Angles


@jit
def _heads(
    source, target, token, from_t, from_h, cos, sin,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, P: tl.constexpr, P_2: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token; the target's layout is [T, heads, D]."""
    h, p = tl.arange(0, HEADS_2)[:, None], tl.arange(0, P_2)[None, :]
    mask = (h < HEADS) & (p < P)
    at = source + token * from_t + h * from_h + p
    first = tl.load(at, mask=mask).to(tl.float32)
    second = tl.load(at + P, mask=mask).to(tl.float32)
    place = target + (token * HEADS + h) * (2 * P) + p
    kind = target.dtype.element_ty
    tl.store(place, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(place + P, (second * cos + first * sin).to(kind), mask=mask)


@jit
def _turn(
    query, key, cos_TP, sin_TP, turned_query, turned_key,
    from_query_t, from_query_h, from_key_t, from_key_h,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, KEYS: tl.constexpr, KEYS_2: tl.constexpr,
    P: tl.constexpr, P_2: tl.constexpr,
):  # fmt: skip
    """Rotate one token per program."""
    token = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P_2)[None, :]
    cos = tl.load(cos_TP + token * P + p, mask=p < P)
    sin = tl.load(sin_TP + token * P + p, mask=p < P)
    _heads(query, turned_query, token, from_query_t, from_query_h, cos, sin, HEADS, HEADS_2, P, P_2)
    _heads(key, turned_key, token, from_key_t, from_key_h, cos, sin, KEYS, KEYS_2, P, P_2)


def turned(query_THD: Tensor, key_TKD: Tensor, angles_TP: Angles) -> tuple[Tensor, Tensor]:
    """Rotate whole heads in half-split pairs; return both in their own dtype, contiguous.

    The numbers of a head must be contiguous in the arguments.
    """
    num_tokens, heads, dim = query_THD.shape
    keys = key_TKD.shape[1]
    assert query_THD.stride(-1) == key_TKD.stride(-1) == 1
    turned_query_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
    turned_key_TKD = torch.empty(key_TKD.shape, dtype=key_TKD.dtype, device=key_TKD.device)
    _turn[(num_tokens,)](
        query_THD, key_TKD, angles_TP.cos, angles_TP.sin, turned_query_THD, turned_key_TKD,
        *query_THD.stride()[:2], *key_TKD.stride()[:2],
        HEADS=heads, HEADS_2=padded(heads, 1), KEYS=keys, KEYS_2=padded(keys, 1),
        P=dim // 2, P_2=padded(dim // 2, 1),
    )  # fmt: skip
    return turned_query_THD, turned_key_TKD
