"""A cache of quantised pages on a GPU: what `gpu/backend.py` does, with two sources of keys.

A layer's two tensors are its records and its tail pages (`attention/quantised/cache.py`). Decodes
are read by two launches of one kernel, for quantised pages and for own pages, and merged. Prompts
are read in parts of one source each (`attention/quantised/quantised_prompts.py`).

Shapes: T = flat query tokens, H = query heads, K = key heads, D = key dimensions, V = value
dimensions, N = quantised pages, R = bytes of a record, X = exact pages, E = numbers of an exact
page of one head, F = tokens that fill a page.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.quantised.own_pages import OwnPages
from ropewalk.model_runtime.attention.quantised.quantised_prompts import QuantisedPrompts, Source
from ropewalk.model_runtime.gpu.attend import rows_at_once
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.cards.tuning import tuning_of
from ropewalk.model_runtime.gpu.decode import decode
from ropewalk.model_runtime.gpu.page_sources import Quantised
from ropewalk.model_runtime.gpu.prefill_parts import PackedPart, merge_parts
from ropewalk.model_runtime.gpu.quantised.quantise import quantise, write
from ropewalk.model_runtime.gpu.quantised_numbers import Records
from ropewalk.model_runtime.gpu.rotate import gathered
from ropewalk.model_runtime.transfer import on_device
from ropewalk.rope import PositionMethod


class QuantisedTritonAttention(TritonAttention):
    """One step's reads and writes of a cache of quantised pages."""

    def __init__(self, batch: Batch) -> None:
        """Prepare a step. The batch has the own pages of its tokens."""
        super().__init__(batch)
        assert batch.own_pages is not None, "a batch for a cache that quantises nothing"
        self._own: OwnPages = batch.own_pages
        self._own_page = self._own.store.page_size
        # By whether a layer has position methods; each is made at first use.
        self._quantised_prompts: dict[bool, QuantisedPrompts] = {}
        device = batch.page_T.device
        self._copies_2C = None  # int64, tail pages that the step leaves, and their stages
        if self._own.copies_C2:
            copies_2C = np.array(self._own.copies_C2, dtype=np.int64).T
            self._copies_2C = on_device(np.ascontiguousarray(copies_2C), device)
        if self._own.recorded_T is not None:
            # Any row may fill a page when the step is replayed.
            self._own_T, self._filled_F = self._own.recorded_T, batch.single_B
            return
        position_T = np.concatenate(
            [np.arange(place.num_tokens) + place.first_position for place in batch.places_S]
        )
        is_last_T = (position_T + 1) % self._own_page == 0
        self._own_T = on_device(self._own.own_T, device)
        self._filled_F = on_device(np.flatnonzero(is_last_T), device)

    def write(
        self, keys_NKDO: Tensor, values_NKOV: Tensor, key_TKD: Tensor, value_TKV: Tensor
    ) -> None:
        """Write keys and values; the first two tensors are a layer's quantised and tail pages."""
        records_NKR, tail_XKE = keys_NKDO, values_NKOV
        staged_GKE = self._own.layer(*tail_XKE.shape[1:])
        if self._copies_2C is not None:
            staged_GKE[self._copies_2C[1]] = tail_XKE[self._copies_2C[0]]
        sides = key_TKD.shape[2], value_TKV.shape[2], self._own_page
        places = self._own_T, self._batch.offset_T
        write(key_TKD, value_TKV, *places, tail_XKE, staged_GKE, self._own_page)
        if len(self._filled_F):
            records = self._records(records_NKR, sides[1])
            exact = tail_XKE, staged_GKE
            quantise(records, *exact, self._filled_F, *places, self._batch.page_T, sides)

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, [T, H, V] in the query's dtype."""
        records_NKR, tail_XKE = read.keys_NKDO, read.values_NKOV
        num_tokens, num_heads, dim = read.query_THD.shape
        value_dim = tail_XKE.shape[2] // self._own_page - dim
        out_THV = read.query_THD.new_empty(num_tokens, num_heads, value_dim)
        records = self._records(records_NKR, value_dim)
        exact = self._exact(read, tail_XKE)
        batch, methods = self._batch, read.tables.positions
        if len(batch.single_B):
            quantised, tuning = Quantised(records, self._own_T), tuning_of(exact)
            work = self._work(exact, tuning)
            decode(exact, batch, work, out_THV, tuning, quantised=quantised)
        prompts = self._prompts_under(methods)
        if len(prompts):
            staged = self._exact(read, self._own.layer(*tail_XKE.shape[1:]))
            sources = {Source.QUANTISED: exact, Source.TAIL: exact, Source.STAGED: staged}
            parts = self._parts(prompts, sources, records)
            merge_parts(exact, parts, prompts.row_T, out_THV)
        return out_THV

    def _records(self, records_NKR: Tensor, value_dim: int) -> Records:
        form = self._own.store.form
        bits = form.key_bits, form.value_bits
        return Records(records_NKR, *bits, form.value_groups(value_dim))

    def _exact(self, read: LayerRead, pages_XKE: Tensor) -> LayerRead:
        """Return the read of exact pages alone."""
        page_size, dim = self._own_page, read.query_THD.shape[2]
        keys_at, heads = page_size * dim, pages_XKE.shape[:2]
        keys_XKOD = pages_XKE[:, :, :keys_at].unflatten(2, (page_size, dim))
        values_XKOV = pages_XKE[:, :, keys_at:].unflatten(2, (page_size, -1))
        assert keys_XKOD.shape[:2] == heads
        return replace(read, keys_NKDO=keys_XKOD.transpose(2, 3), values_NKOV=values_XKOV)

    def _prompts_under(self, methods: Mapping[int, PositionMethod]) -> QuantisedPrompts:
        """Return the prompts for a layer with these methods. All such layers share them."""
        found, has_methods = self._quantised_prompts, bool(methods)
        if has_methods not in found:
            found[has_methods] = QuantisedPrompts(self._batch, self._own, methods)
        return found[has_methods]

    def _parts(
        self, prompts: QuantisedPrompts, sources: Mapping[Source, LayerRead], records: Records
    ) -> Iterator[PackedPart]:
        """Yield each group of parts with its keys and values, gathered from their source."""
        tile = rows_at_once(sources[Source.TAIL])
        table_SN = self._batch.page_table_SN
        for group in prompts.groups(sources[Source.TAIL].sliding_window, tile):
            placed, read = group.placed, sources[group.source]
            key_maps = placed.modulus_G, placed.divisor_G
            table = table_SN if group.page_G is None else group.page_G
            quantised = records if group.source is Source.QUANTISED else None
            yield placed, gathered(read, placed.parts, table, tile, key_maps, quantised)
