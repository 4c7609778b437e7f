"""The reference read: gather the pages, rotate keys at their positions, attend in float32.

This is plain torch on any device. Tests compare the compiled kernels with it, and it serves devices
without a compiled kernel. It computes one sequence at a time, so a long context takes memory for
itself only.

Shapes: T = query tokens of one sequence, C = its context, H = query heads, K = key heads,
G = query heads per key head, D = key dimensions, V = value dimensions, O = offsets in a page.
"""

from typing import ClassVar

import torch
from torch import Tensor

from model_runtime.attention.paged_attention import LayerRead
from model_runtime.batch import Batch, Place
from rope import rotate


class TorchAttention:
    """The cache on any device."""

    row_keys: ClassVar[bool] = True  # either order works; this one needs no transpose to gather
    can_capture: ClassVar[bool] = False

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def write(
        self, keys_NKDO: Tensor, values_NKOV: Tensor, key_TKD: Tensor, value_TKV: Tensor
    ) -> None:
        """Write the step's keys and values to the pages and offsets in the batch."""
        page_T, offset_T = self._batch.page_T, self._batch.offset_T
        keys_NKDO[page_T, :, :, offset_T] = key_TKD
        values_NKOV[page_T, :, offset_T] = value_TKV

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, float32 [T, H, V] over all sequences' tokens."""
        places = enumerate(self._batch.places_S)
        return torch.cat([_attend(read, self._batch, index, place) for index, place in places])


def _attend(read: LayerRead, batch: Batch, index: int, place: Place) -> Tensor:
    begin, num_tokens, first, table_id = place
    context = first + num_tokens
    device = read.query_THD.device
    query_positions_T = torch.arange(first, context, device=device)
    key_positions_C = torch.arange(context, device=device)
    tables = read.tables

    query_THD = read.query_THD[begin : begin + num_tokens].float()
    key_CKD = _gather(read.keys_NKDO.transpose(2, 3), batch.page_table_SN[index], context)
    value_CKV = _gather(read.values_NKOV, batch.page_table_SN[index], context)
    factor = tables.attention_factor[table_id]
    pairs = tables.num_pairs
    query_THD = rotate(query_THD, tables.at(table_id, query_positions_T))
    query_THD[..., : 2 * pairs] *= factor * factor
    query_THD = query_THD * tables.logn_scale(table_id, query_positions_T)[:, None, None]
    key_CKD = rotate(key_CKD, tables.at(table_id, key_positions_C))

    group = query_THD.shape[1] // key_CKD.shape[1]
    query_TKGD = query_THD.view(query_THD.shape[0], -1, group, query_THD.shape[-1])
    logits_KGTC = torch.einsum("tkgd,ckd->kgtc", query_TKGD, key_CKD) * read.scaling
    if read.softcap:
        logits_KGTC = read.softcap * torch.tanh(logits_KGTC / read.softcap)
    distance_TC = query_positions_T[:, None] - key_positions_C
    hidden_TC = distance_TC < 0
    if read.sliding_window:
        hidden_TC = hidden_TC | (distance_TC >= read.sliding_window)
    logits_KGTC = logits_KGTC.masked_fill(hidden_TC, -torch.inf)
    if read.sinks_H is not None:
        sinks_KG11 = read.sinks_H.float().view(-1, group, 1, 1)
        sinks_KGT1 = sinks_KG11.expand(*logits_KGTC.shape[:-1], 1)
        weights_KGTC = torch.cat((logits_KGTC, sinks_KGT1), -1).softmax(-1)[..., :-1]
    else:
        weights_KGTC = logits_KGTC.softmax(-1)
    return torch.einsum("kgtc,ckv->tkgv", weights_KGTC, value_CKV).flatten(1, 2)


def _gather(pages_NKOX: Tensor, page_table_N: Tensor, context: int) -> Tensor:
    """Return a sequence's cached vectors in order of position, float32 [C, K, X]."""
    num_pages = -(-context // pages_NKOX.shape[2])
    gathered_NKOX = pages_NKOX[page_table_N[:num_pages].long()]
    return gathered_NKOX.transpose(1, 2).flatten(0, 1)[:context].float()
