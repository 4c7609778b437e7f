"""The cache on a CPU: partitions a layer's work among threads that run the compiled kernel.

Shapes: T = flat query tokens, C = columns that hold head beside head, H = query heads, K = key
heads, D = key dimensions, V = value dimensions, S = sequences, N = pages, O = offsets in a page,
W = work items.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place
from ropewalk.model_runtime.attention.eight_bits import CodeArrays, Scales
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.ranged_sequences import RangedSequences, ranged_sequences
from ropewalk.model_runtime.attention.rope_tables import LayerTables
from ropewalk.model_runtime.cpu_kernels.attention.attention import (
    TILE,
    attend,
    attend_in_pairs,
    write_kv,
)
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import uses_pairs
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    NO_SINKS,
    NO_SOFTCAP,
    AttentionParams,
    Destinations,
    Ints,
    Numbers,
    PageArrays,
    SequenceArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.threads import num_threads_for, run_items

_SERIAL_WORK = 200_000  # query-key-dimension products that make one more thread worth its cost


class CpuAttention:
    """One step's reads and writes; the data that all layers use is prepared once."""

    # A SIMD register of keys is scored at once, one dimension at a time.
    row_keys: ClassVar[bool] = False
    can_capture: ClassVar[bool] = False

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._places_S = batch.places_S
        self.take_pages(batch)
        self._shares: dict[tuple[int, ...], list[Ints]] = {}  # by a layer's heads and dimensions
        self._ranges: dict[int, RangedSequences | None] = {}  # by the tables' identity

    def take_pages(self, batch: Batch) -> None:
        """Prepare the pages of the batch, as the kernels take them."""
        self.destinations = Destinations(batch.page_T.numpy(), batch.offset_T.numpy())
        self.sequences = SequenceArrays(
            page_table_SN=batch.page_table_SN.numpy(),
            cu_seqlens_S1=batch.cu_seqlens_S1.numpy(),
            first_position_S=batch.first_position_S.numpy(),
            table_id_S=batch.table_id_S.numpy(),
        )
        self._plain_sequences = tuple(self.sequences)  # as the kernel takes them

    def of_group(self, batch: Batch) -> Self:
        """Return this backend over another group's pages of the same step."""
        other = copy(self)
        other.take_pages(batch)
        return other

    @property
    def pages_of_groups(self) -> tuple[NDArray[np.int32], Ints]:
        """Return the page tables of all groups [G, S, N], and each token's pages [G, T]."""
        batch = self._batch
        if batch.page_table_GSN is None or batch.page_GT is None:
            return self.sequences.page_table_SN[None], self.destinations.page_T[None]
        return batch.page_table_GSN.numpy(), batch.page_GT.numpy()

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,  # noqa: ARG002  # codes: EightBitCpuAttention
    ) -> None:
        key_TC, value_TC = (each.flatten(1).contiguous() for each in (key_TKD, value_TKV))
        pages = PageArrays(as_numpy(keys_NKDO), as_numpy(values_NKOV))
        write_kv(as_numpy(key_TC), 0, as_numpy(value_TC), 0, *self.destinations, *pages)

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, float32 [T, H, V]."""
        num_tokens, num_heads, _ = read.query_THD.shape
        sinks_H = read.sinks_H
        out_TC = self.attend(
            as_numpy(read.query_THD.flatten(1).float().contiguous()),
            num_heads,
            self._pages_of(read),
            AttentionParams(
                read.tables.kernel_arrays,
                np.float32(read.scaling),
                read.sliding_window or 0,
                np.float32(read.softcap) if read.softcap else NO_SOFTCAP,
                NO_SINKS if sinks_H is None else sinks_H.detach().float().numpy(),
            ),
            self.ranged(read.tables),
        )
        return torch.from_numpy(out_TC).view(num_tokens, num_heads, -1)

    @property
    def is_one_call(self) -> bool:
        """Return whether a step in one compiled call can write and read the cache."""
        return True

    def access(self, pages: Any) -> Any:
        """Return how a one-call step reads and writes these pages."""
        from ropewalk.model_runtime.cpu_kernels.fused_decode import access_to  # noqa: PLC0415

        return access_to(pages.keys_NKDO)

    def _pages_of(self, read: LayerRead) -> Any:
        return PageArrays(as_numpy(read.keys_NKDO), as_numpy(read.values_NKOV))

    def write_columns(
        self, key_TC: Numbers, key_at: int, value_TC: Numbers, value_at: int, pages: Any
    ) -> None:
        """Write keys and values that begin in these columns of numpy arrays, head by head."""
        write_kv(key_TC, key_at, value_TC, value_at, *self.destinations, *pages)

    def ranged(self, tables: LayerTables) -> RangedSequences | None:
        """Return the sequences that read ranges of keys under these tables; None: there is none."""
        if not tables.positions:
            return None
        if id(tables) not in self._ranges:
            self._ranges[id(tables)] = ranged_sequences(self._places_S, tables.positions)
        return self._ranges[id(tables)]

    def attend(
        self,
        query_TC: Numbers,
        num_heads: int,
        pages: Any,
        params: AttentionParams,
        ranged: RangedSequences | None = None,
    ) -> Numbers:
        """Return the attention of queries in the first columns of a numpy array, head by head."""
        kernel, plain_pages, num_key_heads, dim, value_dim = self._kernel(pages)
        out_TC = np.empty((len(query_TC), num_heads * value_dim), query_TC.dtype)
        group = num_heads // num_key_heads
        arguments = (query_TC, group, plain_pages, self._plain_sequences)
        shares = self.partitioned(num_heads, dim, num_key_heads)
        if ranged is not None:
            read = self._ranges_kernel(ranged, pages)
            own = [ranged.items(share) for share in shares]
            run_items(read, own, *arguments, ranged.plain, params.unnamed(), out_TC)
            if ranged.is_ranged_S.all():
                return out_TC
            shares = [ranged.others(share) for share in shares]
        run_items(kernel, shares, *arguments, params.unnamed(), out_TC)
        return out_TC

    def _kernel(self, pages: Any) -> tuple[Any, tuple[Any, ...], int, int, int]:
        """Return the kernel, the pages as it takes them, and K, D and V."""
        _, num_key_heads, dim, _ = pages.keys_NKDO.shape
        kernel = attend_in_pairs if uses_pairs(pages.keys_NKDO) else attend
        return kernel, tuple(pages), num_key_heads, dim, pages.values_NKOV.shape[3]

    def _ranges_kernel(self, ranged: RangedSequences, pages: Any) -> Any:
        return ranged.kernel(pages.keys_NKDO)

    def _tiles(self, place: Place) -> Iterable[int]:
        """Return the first query of each tile of a sequence's tokens."""
        return range(0, place.num_tokens, TILE)

    def partitioned(self, num_heads: int, dim: int, num_key_heads: int) -> list[Ints]:
        """Return the work items of each thread, dealt out in turn; int64 [W, 3] per thread.

        A work item is (sequence, key head, first query of a tile). The number of threads follows
        the amount of work.
        """
        shape = (num_heads, dim, num_key_heads, torch.get_num_threads())
        if shape not in self._shares:
            items = [
                (sequence, head, tile)
                for sequence, place in enumerate(self._places_S)
                for tile in self._tiles(place)
                for head in range(num_key_heads)
            ]
            items_W3 = np.array(items, dtype=np.int64).reshape(-1, 3)
            products = sum(
                place.num_tokens * (place.first_position + place.num_tokens)
                for place in self._places_S
            )
            work = products * num_heads * dim
            num_threads = num_threads_for(min(len(items), 1 + work // _SERIAL_WORK))
            self._shares[shape] = [
                np.ascontiguousarray(items_W3[first::num_threads]) for first in range(num_threads)
            ]
        return self._shares[shape]


class RoundedCpuAttention(CpuAttention):
    """One step's reads and writes of a cache in bfloat16 under a model in float32.

    Keys and values are rounded when they are written. Queries stay float32, so nothing is
    multiplied in pairs of bfloat16.
    """

    def access(self, pages: Any) -> Any:  # noqa: ARG002
        """Return how a one-call step reads and writes these pages."""
        from ropewalk.model_runtime.cpu_kernels.fused_decode import (  # noqa: PLC0415
            ROUNDED_ACCESS,
        )

        return ROUNDED_ACCESS

    def _kernel(self, pages: Any) -> tuple[Any, tuple[Any, ...], int, int, int]:
        _, *others = super()._kernel(pages)
        return attend, *others

    def _ranges_kernel(self, ranged: RangedSequences, pages: Any) -> Any:  # noqa: ARG002
        from ropewalk.model_runtime.cpu_kernels.attention.attention_ranges import (  # noqa: PLC0415
            attend_ranges,
        )

        return attend_ranges


class EightBitCpuAttention(RoundedCpuAttention):
    """One step's reads and writes of a cache of codes, which the kernel widens as it loads them.

    Queries are scaled before a read, and its output after. Both are float32.
    """

    @property
    def is_one_call(self) -> bool:
        """Return False: the one call of a step knows no scales."""
        return False

    def write(
        self,
        keys_NKDO: Tensor,
        values_NKOV: Tensor,
        key_TKD: Tensor,
        value_TKV: Tensor,
        scales: Scales | None = None,
    ) -> None:
        """Write the codes of keys and values."""
        assert scales is not None, "codes without scales"
        super().write(keys_NKDO, values_NKOV, *scales.codes(key_TKD, value_TKV))

    def write_columns(
        self, key_TC: Numbers, key_at: int, value_TC: Numbers, value_at: int, pages: CodeArrays
    ) -> None:
        """Write the codes of keys and values that begin in these columns, head by head."""
        key_TKD = _columns(key_TC, key_at, pages.scales.key_KD)
        value_TKV = _columns(value_TC, value_at, pages.scales.value_KV)
        keys, values = torch.from_numpy(pages.keys_NKDO), torch.from_numpy(pages.values_NKOV)
        self.write(keys, values, key_TKD, value_TKV, pages.scales)

    def attend(
        self,
        query_TC: Numbers,
        num_heads: int,
        pages: CodeArrays,
        params: AttentionParams,
        ranged: RangedSequences | None = None,
    ) -> Numbers:
        """Return the attention of queries in the first columns of a numpy array, head by head."""
        dim = pages.scales.key_KD.shape[1]
        query_THD = _columns(query_TC, 0, torch.empty(num_heads, dim))
        scaled_TC = as_numpy(pages.scales.scaled(query_THD).flatten(1))
        out_TC = super().attend(scaled_TC, num_heads, pages, params, ranged)
        out_THV = torch.from_numpy(out_TC).view(len(out_TC), num_heads, -1)
        unscaled_TC = pages.scales.unscaled(out_THV).flatten(1)
        return as_numpy(unscaled_TC.to(_dtype(query_TC)))  # type: ignore[no-any-return]

    def _pages_of(self, read: LayerRead) -> CodeArrays:
        assert read.scales is not None, "codes without scales"
        return CodeArrays(as_numpy(read.keys_NKDO), as_numpy(read.values_NKOV), read.scales)

    def _kernel(self, pages: CodeArrays) -> tuple[Any, tuple[Any, ...], int, int, int]:
        return super()._kernel(PageArrays(*pages[:2]))


def _dtype(numbers: Numbers) -> torch.dtype:
    return torch.bfloat16 if numbers.dtype == np.uint16 else torch.float32


def _columns(numbers_TC: Numbers, at: int, like_KX: Tensor) -> Tensor:
    """Return the columns from `at` on as numbers in the shape of `like_KX`, for each token."""
    columns = numbers_TC[:, at : at + like_KX.numel()]
    return as_tensor(columns, _dtype(columns)).view(len(columns), *like_KX.shape)
