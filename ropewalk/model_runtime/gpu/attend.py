"""The prefill's own attention over packed rows, for layers that torch's flash attention lacks.

These are layers with a soft cap, with other dimensions for values than for keys, or in float32. A
program takes a tile of one prompt's query tokens under one head.

Shapes: T = packed query tokens of a group, C = its packed keys, H = query heads, K = key heads,
D = key dimensions, V = value dimensions.
"""

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.prompt_groups import PromptGroup
from ropewalk.model_runtime.attention.work_list import BEYOND
from ropewalk.model_runtime.gpu.launch import is_interpreted, jit
from ropewalk.model_runtime.gpu.primitives import (
    KERNEL_LN_2,
    KERNEL_LOG2_E,
    LOG2_E,
    capped,
    padded,
    product,
    tile_len,
)

_TILE = 64  # max number of keys, and of query tokens, that a program holds at once
_WARPS, _STAGES = 4, 2


@jit("tiles", "rows", "cu_tokens", "cu_keys", "window", "after")
def _attend(
    query, keys, values, sinks, out, lses, tiles, rows, cu_tokens, cu_keys,
    scaling, softcap, window, out_t, out_h, after,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
    TILE: tl.constexpr, DIM_2: tl.constexpr, VALUES_2: tl.constexpr,
    WINDOWED: tl.constexpr, PARTIAL: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of a prompt's query tokens. The last token sees all keys up to the last.

    PARTIAL: a token also sees `after` keys behind its own. The output is a part of the answer, in
    packed rows, and the log-sum-exp goes with it.
    """
    head = tl.program_id(1)
    prompt = tl.load(tiles + 2 * tl.program_id(0))
    if prompt < 0:
        return  # padding of a captured step
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    first_token, first_key = tl.load(cu_tokens + prompt), tl.load(cu_keys + prompt)
    num_tokens = tl.load(cu_tokens + prompt + 1) - first_token
    num_keys = tl.load(cu_keys + prompt + 1) - first_key
    token = first + tl.arange(0, TILE)
    d, v = tl.arange(0, DIM_2), tl.arange(0, VALUES_2)
    is_token = token < num_tokens
    at = (first_token + token).to(tl.int64) * HEADS + head
    queries = tl.load(
        query + at[:, None] * DIM + d[None, :],
        mask=is_token[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    own = num_keys - num_tokens + token  # the key at the token's own position
    row_max = tl.full([TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    if SUNK:
        # A sink is an extra logit without a value.
        sink = tl.load(sinks + head).to(tl.float32)
        row_max = tl.zeros([TILE], tl.float32) + sink * KERNEL_LOG2_E
        row_sum = row_sum + 1.0
    acc = tl.zeros([TILE, VALUES_2], tl.float32)
    least = num_keys - num_tokens + first
    begin = tl.maximum(0, least - window + 1) // TILE if WINDOWED else 0
    last = own
    end = tl.minimum(num_keys, least + TILE)
    if PARTIAL:
        last = tl.minimum(own + after, num_keys - 1)
        end = tl.minimum(num_keys, least + TILE + after)
    end = (end + TILE - 1) // TILE
    for tile in range(begin, end):
        index = tile * TILE + tl.arange(0, TILE)
        is_key = index < num_keys
        at = (first_key + index).to(tl.int64) * (HEADS // GROUP) + head // GROUP
        key = tl.load(
            keys + at[:, None] * DIM + d[None, :],
            mask=is_key[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.zeros([TILE, TILE], tl.float32)
        scores = product(queries, tl.trans(key), scores, WIDE) * scaling
        if CAPPED:
            scores = capped(scores, softcap)
        is_seen = index[None, :] <= last[:, None]
        if WINDOWED:
            is_seen = is_seen & (index[None, :] > own[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row has seen no key yet if its window begins after this tile.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        # The row sum adds the rounded probabilities, because the product uses the rounded ones.
        probs = tl.exp2(scores - finite_max[:, None]).to(values.dtype.element_ty)
        keep = tl.exp2(row_max - finite_max)
        row_sum = row_sum * keep + tl.sum(probs.to(tl.float32), 1)
        row_max = new_max
        value = tl.load(
            values + at[:, None] * VALUES + v[None, :],
            mask=is_key[:, None] & (v < VALUES)[None, :], other=0.0,
        )  # fmt: skip
        acc = product(probs, value, acc * keep[:, None], WIDE)
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # rows after the last token: 0
    if PARTIAL:
        row = (first_token + token).to(tl.int64)
        lse = (row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))) * KERNEL_LN_2
        tl.store(lses + row * HEADS + head, lse, mask=is_token)
    else:
        row = tl.load(rows + first_token + token, mask=is_token, other=0).to(tl.int64)
    target = out + row[:, None] * out_t + head * out_h + v[None, :]
    tl.store(target, acc, mask=is_token[:, None] & (v < VALUES)[None, :])


def rows_at_once(read: LayerRead) -> int:
    """Return the number of query tokens, and of keys, that a program takes in this layer."""
    width = max(read.query_THD.shape[-1], read.values_NKOV.shape[-1])
    return tile_len(_TILE, width, read.query_THD.dtype)


def attend(
    read: LayerRead,
    group: PromptGroup,
    query_THD: Tensor,
    key_CKD: Tensor,
    value_CKV: Tensor,
    out_RHV: Tensor,
) -> None:
    """Write a group's output to its rows of `out_RHV`, R = flat rows. No other row is changed."""
    _launch(read, group, (query_THD, key_CKD, value_CKV), read.sinks_H, out_RHV, None)


def attend_part(
    read: LayerRead, group: PromptGroup, query_THD: Tensor, key_CKD: Tensor, value_CKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a group's output without sinks, [T, H, V], and its natural log-sum-exp, [H, T].

    Both are float32, in packed rows.
    """
    num_tokens, num_heads, _ = query_THD.shape
    out_THV = query_THD.new_empty(num_tokens, num_heads, value_CKV.shape[-1], dtype=torch.float32)
    lse_TH = query_THD.new_empty(num_tokens, num_heads, dtype=torch.float32)
    _launch(read, group, (query_THD, key_CKD, value_CKV), None, out_THV, lse_TH)
    return out_THV, lse_TH.T


def _launch(
    read: LayerRead,
    group: PromptGroup,
    packed: tuple[Tensor, Tensor, Tensor],
    sinks_H: Tensor | None,
    out_XHV: Tensor,
    lse_TH: Tensor | None,
) -> None:
    """Run the kernel; with `lse_TH` the output is in packed rows, else in the flat row."""
    query_THD, _, value_CKV = packed
    _, num_heads, dim = query_THD.shape
    _, num_key_heads, value_dim = value_CKV.shape
    softcap, is_partial = read.softcap or 0.0, lse_TH is not None
    # All parts have one kernel, so that none is compiled while requests wait.
    left, right = (BEYOND if side < 0 else side for side in group.mask)
    _attend[(len(group.token_tiles_W2), num_heads)](
        *packed, query_THD if sinks_H is None else sinks_H,
        out_XHV, query_THD if lse_TH is None else lse_TH,
        group.token_tiles_W2, group.row_T, group.cu_tokens_G1, group.cu_keys_G1,
        read.scaling * (1.0 if softcap else LOG2_E), softcap, left + 1,
        *out_XHV.stride()[:2], right,
        HEADS=num_heads, GROUP=num_heads // num_key_heads, DIM=dim, VALUES=value_dim,
        TILE=rows_at_once(read), DIM_2=padded(dim), VALUES_2=padded(value_dim),
        WINDOWED=is_partial or left < BEYOND, PARTIAL=is_partial,
        CAPPED=softcap > 0, SUNK=sinks_H is not None,
        WIDE=is_interpreted() and query_THD.dtype == torch.bfloat16,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
