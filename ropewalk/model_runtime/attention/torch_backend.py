"""The reference read: gather the pages, rotate keys at their positions, attend in float32.

This is plain torch on any device. Tests compare the compiled kernels with it, and it serves devices
without a compiled kernel. It computes one sequence at a time, so a long context takes memory for
itself only.

Shapes: T = query tokens of one sequence, C = its context, H = query heads, K = key heads,
G = query heads per key head, D = key dimensions, V = value dimensions, O = offsets in a page.
"""

from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.step_ranges import StepRanges, step_ranges
from ropewalk.rope import KeyMap
from ropewalk.rope.angles import rotate


class TorchAttention:
    """The cache on any device."""

    row_keys: ClassVar[bool] = True  # either order works; this one needs no transpose to gather
    can_capture: ClassVar[bool] = False

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def of_group(self, batch: Batch) -> Self:
        """Return a backend over another group's pages of the same step."""
        return type(self)(batch)

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,
    ) -> None:
        if scales is not None:
            key_TKD, value_TKV = scales.codes(key_TKD, value_TKV)
        page_T, offset_T = self._batch.page_T, self._batch.offset_T
        keys_NKDO[page_T, :, :, offset_T] = key_TKD.to(keys_NKDO.dtype)
        values_NKOV[page_T, :, offset_T] = value_TKV.to(values_NKOV.dtype)

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, float32 [T, H, V] over all sequences' tokens."""
        ranges = step_ranges(self._batch.places_S, read.tables.positions)
        scales = read.scales
        if scales is not None:
            read = replace(read, query_THD=scales.scaled(read.query_THD))
        out_THV = torch.cat(
            [
                _attend(read, self._batch, index, _parts(ranges, index, place))
                for index, place in enumerate(self._batch.places_S)
            ]
        )
        return out_THV if scales is None else scales.unscaled(out_THV)


class _Part(NamedTuple):
    """A range of keys, and where it places the queries and the keys."""

    begin_T: Tensor  # of the keys that each query sees
    end_T: Tensor
    query_T: Tensor
    key_map: KeyMap


def _parts(ranges: StepRanges | None, index: int, place: Place) -> list[_Part]:
    """Return the ranges that a sequence reads: its own, or all keys at their positions."""
    begin, num_tokens, first, _ = place
    if ranges is None or not ranges.key_maps_SX[index]:
        positions_T = torch.arange(first, first + num_tokens)
        return [_Part(positions_T * 0, positions_T + 1, positions_T, KeyMap())]
    own = slice(begin, begin + num_tokens)
    return [
        _Part(ranges.begin_XT[x, own], ranges.end_XT[x, own], ranges.query_XT[x, own], key_map)
        for x, key_map in enumerate(ranges.key_maps_SX[index])
        if bool((ranges.begin_XT[x, own] < ranges.end_XT[x, own]).any())
    ]


def _attend(read: LayerRead, batch: Batch, index: int, parts: list[_Part]) -> Tensor:
    begin, num_tokens, first, table_id = batch.places_S[index]
    context = first + num_tokens
    device = read.query_THD.device
    query_positions_T = torch.arange(first, context, device=device)
    tables = read.tables

    query_THD = read.query_THD[begin : begin + num_tokens].float()
    key_CKD = _gather(read.keys_NKDO.transpose(2, 3), batch.page_table_SN[index], context)
    value_CKV = _gather(read.values_NKOV, batch.page_table_SN[index], context)
    if read.sliding_window:
        # Pages before the window may be another sequence's by now. A weight of zero times what
        # they hold is zero, unless that is NaN.
        value_CKV[: max(0, first + 1 - read.sliding_window)] = 0.0
    factor = tables.attention_factor[table_id]
    # By the true position, wherever a range places the query.
    logn_T = tables.logn_scale(table_id, query_positions_T)
    logits, values = [], []
    for part in parts:
        begin_T, end_T, query_T = (each.to(device) for each in part[:3])
        lowest, end = int(begin_T.min()), int(end_T.max())
        index_C = torch.arange(lowest, end, device=device)
        at_query, at_key = (
            tables.at(table_id, each) for each in (query_T, part.key_map.positions(index_C))
        )
        turned_THD = rotate(query_THD, at_query)
        turned_THD[..., : 2 * tables.num_pairs] *= factor * factor
        turned_THD = turned_THD * logn_T[:, None, None]
        logits_KGTC = _logits(read, turned_THD, rotate(key_CKD[lowest:end], at_key))
        hidden_TC = (index_C < begin_T[:, None]) | (index_C >= end_T[:, None])
        if read.sliding_window:
            hidden_TC |= query_positions_T[:, None] - index_C >= read.sliding_window
        logits.append(logits_KGTC.masked_fill(hidden_TC, -torch.inf))
        values.append(value_CKV[lowest:end])
    # One softmax over all ranges: they are disjoint.
    logits_KGTC = torch.cat(logits, -1) if len(logits) > 1 else logits[0]
    value_CKV = torch.cat(values) if len(values) > 1 else values[0]
    if read.sinks_H is not None:
        num_key_heads, group = logits_KGTC.shape[:2]
        sinks_KG11 = read.sinks_H.float().view(num_key_heads, group, 1, 1)
        sinks_KGT1 = sinks_KG11.expand(*logits_KGTC.shape[:-1], 1)
        weights_KGTC = torch.cat((logits_KGTC, sinks_KGT1), -1).softmax(-1)[..., :-1]
    else:
        weights_KGTC = logits_KGTC.softmax(-1)
    return torch.einsum("kgtc,ckv->tkgv", weights_KGTC, value_CKV).flatten(1, 2)


def _logits(read: LayerRead, query_THD: Tensor, key_CKD: Tensor) -> Tensor:
    """Return the capped logits of rotated queries and keys, [K, G, T, C]."""
    group = query_THD.shape[1] // key_CKD.shape[1]
    query_TKGD = query_THD.view(query_THD.shape[0], -1, group, query_THD.shape[-1])
    logits_KGTC = torch.einsum("tkgd,ckd->kgtc", query_TKGD, key_CKD) * read.scaling
    if read.softcap:
        logits_KGTC = read.softcap * torch.tanh(logits_KGTC / read.softcap)
    return logits_KGTC


def _gather(pages_NKOX: Tensor, page_table_N: Tensor, context: int) -> Tensor:
    """Return a sequence's cached vectors in order of position, float32 [C, K, X]."""
    num_pages = -(-context // pages_NKOX.shape[2])
    gathered_NKOX = pages_NKOX[page_table_N[:num_pages].long()]
    return gathered_NKOX.transpose(1, 2).flatten(0, 1)[:context].float()
