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

    def __init__(self, batch: Batch) -> None:
        self._places = batch.page_T.numpy(), batch.offset_T.numpy()
        self._query_start_S1 = batch.query_start_S1.numpy()
        self._first_position_S = batch.first_position_S.numpy()
        self._sequences = (
            batch.page_table_SN.numpy(),
            self._query_start_S1,
            self._first_position_S,
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
            *self._places,
            as_numpy(keys_NKDO),
            as_numpy(values_NKOV),
        )

    def read(self, read: LayerRead) -> Tensor:
        """Attention of one layer; float32 [T, H, V]."""
        out_THV = torch.empty(*read.query_THD.shape[:2], read.values_NKOV.shape[-1])
        sinks_H = read.sinks_H
        arguments: tuple[Any, ...] = (
            read.query_THD.float().contiguous().numpy(),
            as_numpy(read.keys_NKDO),
            as_numpy(read.values_NKOV),
            *self._sequences,
            read.tables.kernel_arrays,
            np.float32(read.scaling),
            np.int64(read.sliding_window or 0),
            np.float32(read.softcap or 0.0),
            _NO_SINKS if sinks_H is None else sinks_H.detach().float().numpy(),
            out_THV.numpy(),
        )
        _, num_heads, dim = read.query_THD.shape
        shares = self._dealt(num_heads, dim, read.keys_NKDO.shape[1])
        run_shares(lambda share: attend(share, *arguments), shares)
        return out_THV

    def _dealt(self, num_heads: int, dim: int, num_key_heads: int) -> list[Any]:
        """The work, dealt out card by card to as many threads as it can feed.

        A card is (sequence, key head, first query of a tile); int64 [W, 3] a thread.
        """
        shape = (num_heads, dim, num_key_heads, torch.get_num_threads())
        if shape not in self._shares:
            num_queries_S = np.diff(self._query_start_S1)
            items = [
                (sequence, head, tile)
                for sequence, num_queries in enumerate(num_queries_S.tolist())
                for tile in range(0, num_queries, TILE)
                for head in range(num_key_heads)
            ]
            items_W3 = np.array(items, dtype=np.int64).reshape(-1, 3)
            contexts_S = self._first_position_S + num_queries_S
            work = int((contexts_S * num_queries_S).sum()) * num_heads * dim
            num_threads = min(
                torch.get_num_threads(), MOST_THREADS, len(items), 1 + work // _SERIAL_WORK
            )
            self._shares[shape] = [
                np.ascontiguousarray(items_W3[first::num_threads]) for first in range(num_threads)
            ]
        return self._shares[shape]
