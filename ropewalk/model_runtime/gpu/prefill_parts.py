"""The GPU's read for prompts that a position method reads, part by part.

Each part of a prompt (placed_prompts.py) is read like a prompt of its own: queries and keys are
rotated to where its range places them, and torch's flash attention or our kernel reads them. The
parts of a row are merged in float32 by their log-sum-exp, which begins at minus infinity. A sink is
an extra logit of the row, so it takes its share at the end, once.

Shapes: T = packed query tokens of a group, H = query heads, V = value dimensions, R = flat rows.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.placed_prompts import PlacedGroup, PlacedPrompts
from ropewalk.model_runtime.attention.prompt_groups import PromptGroup
from ropewalk.model_runtime.gpu.attend import attend_part, rows_at_once
from ropewalk.model_runtime.gpu.flash import flash_part, serves
from ropewalk.model_runtime.gpu.launch import jit, never_repeat
from ropewalk.model_runtime.gpu.primitives import padded
from ropewalk.model_runtime.gpu.rotate import gathered, heads_at_once, turned

# Takes a read, a group, and its packed queries, keys and values.
AttendPart = Callable[[LayerRead, PromptGroup, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
PackedPart = tuple[PlacedGroup, tuple[Tensor, Tensor]]  # with its packed keys and values


@jit("rows", "lse_t", "lse_h")
def _add(
    part, lses, rows, sums, sum_lses, lse_t, lse_h,
    HEADS: tl.constexpr, VALUES: tl.constexpr, HEADS_2: tl.constexpr, VALUES_2: tl.constexpr,
):  # fmt: skip
    """Some heads of a token: its part joins what its row has so far."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    h, v = tl.program_id(1) * HEADS_2 + tl.arange(0, HEADS_2), tl.arange(0, VALUES_2)[None, :]
    is_head = h < HEADS
    mask = is_head[:, None] & (v < VALUES)
    none = float("-inf")
    place = sum_lses + row * HEADS + h
    before = tl.load(place, mask=is_head, other=0.0)
    own = tl.load(lses + token * lse_t + h * lse_h, mask=is_head, other=0.0)
    most = tl.maximum(before, own)
    finite = tl.where(most == none, 0.0, most)
    kept, added = tl.exp(before - finite), tl.exp(own - finite)
    weight = kept + added
    weight = tl.where(weight > 0, weight, 1.0)
    tl.debug_barrier()  # one warp writes the row's sum, and every warp has read it before
    tl.store(place, most + tl.log(weight), mask=is_head)
    at = (row * HEADS + h)[:, None] * VALUES + v
    so_far = tl.load(sums + at, mask=mask, other=0.0)
    more = tl.load(part + (token * HEADS + h)[:, None] * VALUES + v, mask=mask, other=0.0)
    joined = so_far * (kept / weight)[:, None] + more.to(tl.float32) * (added / weight)[:, None]
    tl.store(sums + at, joined, mask=mask)


@jit("rows")
def _finish(
    sums, sum_lses, sinks, rows, out, out_t, out_h,
    HEADS: tl.constexpr, VALUES: tl.constexpr, HEADS_2: tl.constexpr, VALUES_2: tl.constexpr,
    SUNK: tl.constexpr,
):  # fmt: skip
    """Write some heads of a token to its flat row. SUNK: the sink takes its share of the weight."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    h, v = tl.program_id(1) * HEADS_2 + tl.arange(0, HEADS_2), tl.arange(0, VALUES_2)[None, :]
    mask = (h < HEADS)[:, None] & (v < VALUES)
    value = tl.load(sums + (row * HEADS + h)[:, None] * VALUES + v, mask=mask, other=0.0)
    if SUNK:
        # The keys' share is exp(lse) / (exp(lse) + exp(sink)).
        lse = tl.load(sum_lses + row * HEADS + h, mask=h < HEADS, other=0.0)
        sink = tl.load(sinks + h, mask=h < HEADS, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(lse - sink)[:, None]
    tl.store(out + row * out_t + (h * out_h)[:, None] + v, value, mask=mask)


def prefill_placed(
    read: LayerRead,
    prompts: PlacedPrompts,
    page_table_SN: Tensor,
    out_RHV: Tensor,
    chosen: AttendPart | None = None,
) -> None:
    """Write the output of the prompts to their rows of `out_RHV`. No other row is changed.

    `chosen`: `flash_part` or `attend_part`; None: the first one if it supports the layer.
    """
    never_repeat()  # parts are merged by functions of torch, too
    tile = rows_at_once(read)

    def parts() -> Iterator[PackedPart]:
        for placed in prompts.groups(read.sliding_window, tile):
            key_maps = placed.modulus_G, placed.divisor_G
            yield placed, gathered(read, placed.parts, page_table_SN, tile, key_maps)

    merge_parts(read, parts(), prompts.row_T, out_RHV, chosen)


def merge_parts(
    read: LayerRead,
    parts: Iterable[PackedPart],
    row_T: Tensor,
    out_RHV: Tensor,
    chosen: AttendPart | None = None,
) -> None:
    """Write the merged output of all parts to the rows `row_T` of `out_RHV`; as `prefill_placed`.

    `parts`: each has its keys and values when it is asked for, so they are freed before the next.
    """
    attention = chosen or (flash_part if serves(read) else attend_part)
    _, num_heads, value_dim = out_RHV.shape
    sum_RHV = torch.zeros_like(out_RHV, dtype=torch.float32)
    lse_RH = torch.full_like(sum_RHV[..., 0], -torch.inf)
    heads = heads_at_once(num_heads, value_dim)
    sizes = {
        "HEADS": num_heads, "VALUES": value_dim, "HEADS_2": heads, "VALUES_2": padded(value_dim),
    }  # fmt: skip
    programs = -(-num_heads // heads)
    for placed, packed in parts:
        group = placed.parts
        part_THV, lse_HT = attention(read, group, turned(read, placed.queries), *packed)
        del packed
        _add[(len(group.row_T), programs)](
            part_THV, lse_HT, group.row_T, sum_RHV, lse_RH, lse_HT.stride(1), lse_HT.stride(0),
            **sizes,
        )  # fmt: skip
    sinks_H = read.sinks_H
    _finish[(len(row_T), programs)](
        sum_RHV, lse_RH, lse_RH if sinks_H is None else sinks_H, row_T, out_RHV,
        *out_RHV.stride()[:2], **sizes, SUNK=sinks_H is not None,
    )  # fmt: skip
