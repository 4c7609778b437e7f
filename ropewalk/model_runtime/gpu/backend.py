"""The cache on a GPU: Triton kernels, and torch's attention if that is faster.

Sequences with one query token go to the decode kernel together, and the others to the prefill, or
to the prefill of parts if their table has a position method.
Importing this file imports triton, which torch's CUDA builds include.

Shapes: T = flat query tokens, H = query heads, K = key heads, D = key dimensions, V = value
dimensions, S = sequences, N = pages, O = offsets in a page.
"""

from collections.abc import Mapping
from copy import copy
from typing import ClassVar, Self

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.placed_prompts import PlacedPrompts
from ropewalk.model_runtime.attention.prompt_groups import PaddedPrompts, Prompts
from ropewalk.model_runtime.attention.work_list import Rows, WorkList, contexts_of
from ropewalk.model_runtime.gpu.cards.tuning import Tuning, tuning_of
from ropewalk.model_runtime.gpu.decode import cut_of, decode
from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.prefill import prefill
from ropewalk.model_runtime.gpu.prefill_parts import prefill_placed
from ropewalk.model_runtime.gpu.primitives import bounded, key_strides, padded, scale_tensors
from ropewalk.model_runtime.transfer import make_current
from ropewalk.rope import PositionMethod

_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer


@jit
def _codes(numbers, scale):
    """Return the codes of numbers, rounded to nearest even. That of NaN is 0."""
    code = bounded(numbers.to(tl.float32) / scale, 127.0)
    code = (tl.where(code == code, code, 0.0) + _TO_INTEGER) - _TO_INTEGER  # noqa: PLR0124
    return code.to(tl.int8)


@jit("page_T", "offset_T")
def _put(
    key, value, page_T, offset_T, keys, values, key_scales, value_scales,
    from_key_t, from_key_k, from_key_d, from_value_t, from_value_k, from_value_v,
    KEY_N: tl.constexpr, KEY_K: tl.constexpr, KEY_O: tl.constexpr, KEY_D: tl.constexpr,
    VALUE_N: tl.constexpr, VALUE_K: tl.constexpr, VALUE_O: tl.constexpr, VALUE_V: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
    HEADS_2: tl.constexpr, DIM_2: tl.constexpr, VALUES_2: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values to its page, all heads. CODED: as codes of eight bits."""
    token = tl.program_id(0).to(tl.int64)
    page, offset = tl.load(page_T + token), tl.load(offset_T + token)
    k = tl.arange(0, HEADS_2)[:, None]
    d, v = tl.arange(0, DIM_2)[None, :], tl.arange(0, VALUES_2)[None, :]
    is_key, is_value = (k < HEADS) & (d < DIM), (k < HEADS) & (v < VALUES)
    one = tl.load(key + token * from_key_t + k * from_key_k + d * from_key_d, mask=is_key)
    if CODED:
        scale = tl.load(key_scales + k * DIM + d, mask=is_key, other=1.0)
        one = _codes(one, scale)
    place = keys + page * KEY_N + offset * KEY_O
    tl.store(place + k * KEY_K + d * KEY_D, one, mask=is_key)
    source = value + token * from_value_t
    two = tl.load(source + k * from_value_k + v * from_value_v, mask=is_value)
    if CODED:
        scale = tl.load(value_scales + k * VALUES + v, mask=is_value, other=1.0)
        two = _codes(two, scale)
    place = values + page * VALUE_N + offset * VALUE_O
    tl.store(place + k * VALUE_K + v * VALUE_V, two, mask=is_value)


class TritonAttention:
    """One step's reads and writes; the data that all layers use is prepared once."""

    # A key is read and written as one row, in whole cache lines.
    row_keys: ClassVar[bool] = True
    can_capture: ClassVar[bool] = True
    is_repeatable: ClassVar[bool] = True  # layers of one kind differ in tensors only (flat_forward)

    def __init__(self, batch: Batch) -> None:
        make_current(batch.page_T.device)
        self._batch = batch
        # Of layers whose tables have no position method.
        self._prompts: Prompts | PaddedPrompts = batch.prompts or Prompts(batch)
        self._divided: list[tuple[Prompts, PlacedPrompts]] = []  # the others, made at first use

    def of_group(self, batch: Batch) -> Self:
        """Return this backend over another group's pages; lists of the step are shared."""
        other = copy(self)
        other.take_pages(batch)
        return other

    def take_pages(self, batch: Batch) -> None:
        """Read and write the pages of the batch."""
        self._batch = batch

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,
    ) -> None:
        """Write the step's keys and values to the pages and offsets in the batch."""
        num_tokens, num_heads, dim = key_TKD.shape
        value_dim = value_TKV.shape[-1]
        _put[(num_tokens,)](
            key_TKD, value_TKV, self._batch.page_T, self._batch.offset_T, keys_NKDO, values_NKOV,
            *scale_tensors(scales, keys_NKDO),  # a row of a list would be unaligned
            *key_TKD.stride(), *value_TKV.stride(),
            *key_strides(keys_NKDO), *values_NKOV.stride(),
            HEADS=num_heads, DIM=dim, VALUES=value_dim,
            HEADS_2=padded(num_heads, 1), DIM_2=padded(dim), VALUES_2=padded(value_dim),
            CODED=scales is not None,
        )  # fmt: skip

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, [T, H, V] in the query's dtype."""
        num_tokens, num_heads, _ = read.query_THD.shape
        # Nothing writes the rows of padding tokens, and what follows computes with them.
        make = torch.empty if self._batch.prompts is None else torch.zeros
        out_THV = make(
            num_tokens,
            num_heads,
            read.values_NKOV.shape[-1],
            dtype=read.query_THD.dtype,
            device=read.query_THD.device,
        )
        batch, methods = self._batch, read.tables.positions
        if len(batch.single_B):
            tuning = tuning_of(read)
            decode(read, batch, self._work(read, tuning), out_THV, tuning)
        prompts = self._prompts
        if methods:
            prompts, placed = self._divided_by(methods)
            if len(placed):
                prefill_placed(read, placed, batch.page_table_SN, out_THV)
        if len(prompts):
            prefill(read, prompts, batch.page_table_SN, out_THV)
        return out_THV

    def _divided_by(self, methods: Mapping[int, PositionMethod]) -> tuple[Prompts, PlacedPrompts]:
        """Return the prompts without a method, and those with one. All such layers share them."""
        if not self._divided:
            both = Prompts(self._batch, methods), PlacedPrompts(self._batch, methods)
            self._divided.append(both)
        return self._divided[0]

    def _work(self, read: LayerRead, tuning: Tuning) -> WorkList:
        """Return the pieces of the contexts with one query token, for a layer's cut."""
        cut = cut_of(read, tuning)
        lists, methods = self._batch.work_lists, read.tables.positions
        if cut not in lists:
            places = self._batch.places_S
            position_S = np.array(
                [place.first_position if place.num_tokens == 1 else -1 for place in places]
            )
            table_id_S = np.array([place.table_id for place in places])
            rows = Rows(position_S, table_id_S, np.array(self._batch.same_pages_S))
            contexts = contexts_of(rows, cut, methods)
            lists[cut] = WorkList.of(contexts, cut, read.query_THD.device, methods)
        work: WorkList = lists[cut]
        return work
