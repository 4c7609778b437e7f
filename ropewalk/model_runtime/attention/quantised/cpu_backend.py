"""A cache of quantised pages on a CPU: what `attention/cpu_backend.py` does, with other kernels.

A layer's two tensors are its quantised pages and its tail pages (`cache.py`).

Shapes: N = quantised pages, X = tail pages, K = key heads, R = bytes of a record, E = numbers of a
tail page of one head, T = flat query tokens, D = key dimensions, V = value dimensions, C = columns
that hold head beside head.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.quantised.own_pages import LayerPages, OwnPages
from ropewalk.model_runtime.attention.ranged_sequences import RangedSequences
from ropewalk.model_runtime.cpu_kernels.attention.attention import TILE
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Destinations, Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy
from ropewalk.model_runtime.cpu_kernels.quantised.attention import ACCESS, attend_quantised
from ropewalk.model_runtime.cpu_kernels.quantised.quantise import write_pages


class QuantisedCpuAttention(CpuAttention):
    """One step's reads and writes of a cache of quantised pages."""

    def __init__(self, batch: Batch) -> None:
        """Prepare a step. The batch has the own pages of its tokens."""
        assert batch.own_pages is not None, "a batch for a cache that quantises nothing"
        self._own: OwnPages = batch.own_pages
        super().__init__(batch)

    def take_pages(self, batch: Batch) -> None:
        """Prepare the pages of the batch. The own pages of a token are those of all groups."""
        super().take_pages(batch)
        self.destinations = Destinations(self._own.own_T, self.destinations.offset_T)

    @property
    def is_one_call(self) -> bool:
        """Return whether each sequence writes one page, as the one-call step needs."""
        return not len(self._own.staged)

    def access(self, pages: Any) -> Any:  # noqa: ARG002
        """Return how a one-call step reads and writes these pages."""
        return ACCESS

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,  # noqa: ARG002  # these pages hold their own
    ) -> None:
        """Write keys and values; the first two tensors are a layer's quantised and tail pages."""
        key_TC, value_TC = (each.flatten(1).contiguous() for each in (key_TKD, value_TKV))
        pages = self._pages(keys_NKDO, values_NKOV, key_TKD.shape[2])
        self.write_columns(as_numpy(key_TC), 0, as_numpy(value_TC), 0, pages)

    def _pages(self, records_NKR: Tensor, tail_XKE: Tensor, dim: int) -> LayerPages:
        store, num_heads = self._own.store, records_NKR.shape[1]
        sides = store.sides(num_heads, dim, tail_XKE.shape[2] // store.page_size - dim)
        return LayerPages(as_numpy(records_NKR), as_numpy(tail_XKE), sides)

    def _pages_of(self, read: LayerRead) -> Any:
        return self._pages(read.keys_NKDO, read.values_NKOV, read.query_THD.shape[2])

    def _plain(self, pages: LayerPages) -> tuple[Any, ...]:
        """Return the pages of a layer as the kernels take them."""
        staged = as_numpy(self._own.layer(*pages.tail_XKE.shape[1:]))
        return pages.records_NKR, pages.tail_XKE, staged, self._own.own_T, pages.sides

    def write_columns(
        self, key_TC: Numbers, key_at: int, value_TC: Numbers, value_at: int, pages: Any
    ) -> None:
        """Write keys and values that begin in these columns, and quantise the pages they fill."""
        plain = self._plain(pages)
        for tail_page, staged in self._own.copies_C2:
            plain[2][staged] = pages.tail_XKE[tail_page]
        write_pages(
            key_TC, key_at, value_TC, value_at, tuple(self.destinations), self._plain_sequences,
            plain,
        )  # fmt: skip

    def _kernel(self, pages: Any) -> tuple[Any, tuple[Any, ...], int, int, int]:
        num_key_heads, dim, value_dim, *_ = pages.sides
        return attend_quantised, self._plain(pages), num_key_heads, dim, value_dim

    def _ranges_kernel(self, ranged: RangedSequences, pages: Any) -> Any:  # noqa: ARG002
        from ropewalk.model_runtime.cpu_kernels.quantised.ranges import (  # noqa: PLC0415  # rare
            attend_quantised_ranges,
        )

        return attend_quantised_ranges

    def _tiles(self, place: Place) -> Iterable[int]:
        """Return the first query of each tile; a tile ends with its page."""
        page_size, first, tile = self._own.store.page_size, place.first_position, 0
        while tile < place.num_tokens:
            yield tile
            tile += min(TILE, page_size - (first + tile) % page_size)
