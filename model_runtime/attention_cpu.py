"""The cache on a CPU: deals a layer's work out to threads that run the compiled kernel.

Shapes: T = flat query tokens, H = query heads, K = key heads, D = key dimensions, V = value
dimensions, S = sequences, N = pages, O = offsets in a page, W = work items.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from model_runtime.attention import LayerRead
from model_runtime.attention_kernel import TILE, attend, put
from model_runtime.batch import Batch
from model_runtime.bfloat16 import as_numpy
from model_runtime.kernel_threads import MOST_THREADS, run_shares

_SERIAL_WORK = 200_000  # query-key-dimension products below which threads cost more than they give
_NO_SINKS = np.empty(0, np.float32)


class CpuAttention:
    """One step's reads and writes; what layers share is prepared once."""

    # Sixteen keys are scored at once, a dimension at a time.
    row_keys: ClassVar[bool] = False
    is_recordable: ClassVar[bool] = False

    def __init__(self, batch: Batch) -> None:
        self._places_S = batch.places_S
        self._destinations = batch.page_T.numpy(), batch.offset_T.numpy()
        self._sequences = (
            batch.page_table_SN.numpy(),
            batch.query_start_S1.numpy(),
            batch.first_position_S.numpy(),
            batch.table_slot_S.numpy(),
        )
        self._shares: dict[tuple[int, ...], list[Any]] = {}  # by a layer's heads and dimensions

    def write(
        self, keys_NKDO: Tensor, values_NKOV: Tensor, key_TKD: Tensor, value_TKV: Tensor
    ) -> None:
        """Put the step's keys and values where the batch says."""
        put(
            as_numpy(key_TKD.contiguous()),
            as_numpy(value_TKV.contiguous()),
            *self._destinations,
            as_numpy(keys_NKDO),
            as_numpy(values_NKOV),
        )

    def read(self, read: LayerRead) -> Tensor:
        """Attention of one layer; float32 [T, H, V]."""
        query_THD = as_numpy(read.query_THD.float().contiguous())
        num_tokens, num_heads, dim = query_THD.shape
        values_NKOV = as_numpy(read.values_NKOV)
        out_THV = np.empty((num_tokens, num_heads, values_NKOV.shape[-1]), np.float32)
        sinks_H = read.sinks_H
        arguments: tuple[Any, ...] = (
            query_THD,
            as_numpy(read.keys_NKDO),
            values_NKOV,
            *self._sequences,
            read.tables.kernel_arrays,
            np.float32(read.scaling),
            np.int64(read.sliding_window or 0),
            np.float32(read.softcap or 0.0),
            _NO_SINKS if sinks_H is None else sinks_H.detach().float().numpy(),
            out_THV,
        )
        shares = self._dealt(num_heads, dim, values_NKOV.shape[1])
        run_shares(lambda share: attend(share, *arguments), shares)
        return torch.from_numpy(out_THV)

    def _dealt(self, num_heads: int, dim: int, num_key_heads: int) -> list[Any]:
        """The work, dealt out card by card to as many threads as it can feed.

        A card is (sequence, key head, first query of a tile); int64 [W, 3] a thread.
        """
        shape = (num_heads, dim, num_key_heads, torch.get_num_threads())
        if shape not in self._shares:
            items = [
                (sequence, head, tile)
                for sequence, place in enumerate(self._places_S)
                for tile in range(0, place.num_tokens, TILE)
                for head in range(num_key_heads)
            ]
            items_W3 = np.array(items, dtype=np.int64).reshape(-1, 3)
            products = sum(
                place.num_tokens * (place.first_position + place.num_tokens)
                for place in self._places_S
            )
            work = products * num_heads * dim
            num_threads = min(
                torch.get_num_threads(), MOST_THREADS, len(items), 1 + work // _SERIAL_WORK
            )
            self._shares[shape] = [
                np.ascontiguousarray(items_W3[first::num_threads]) for first in range(num_threads)
            ]
        return self._shares[shape]
