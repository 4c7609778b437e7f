"""The read on a CPU: deals a layer's work out to threads that run the compiled kernel.

Shapes: T = flat query tokens, H = query heads, D = key dimensions, V = value dimensions,
S = sequences, N = pages, O = offsets in a page, W = work items.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runtime.attention import LayerRead
from model_runtime.attention_kernel import TILE, attend

_MOST_THREADS = 64  # started as they are needed
_SERIAL_WORK = 200_000  # query-key-dimension products below which threads cost more than they give


def attend_cpu(read: LayerRead) -> Tensor:
    """Attention of one layer for one step; float32 [T, H, V]."""
    out_THV = torch.empty(*read.query_THD.shape[:2], read.values_NKOV.shape[-1])
    query_THD = read.query_THD.float().contiguous()
    arguments: tuple[Any, ...] = (
        query_THD.numpy(),
        _as_numpy(read.keys_NKDO),
        _as_numpy(read.values_NKOV),
        read.batch.page_table_SN.numpy(),
        read.batch.query_start_S1.numpy(),
        read.batch.first_position_S.numpy(),
        read.batch.table_slot_S.numpy(),
        read.tables.kernel_arrays,
        np.float32(read.scaling),
        np.int64(read.sliding_window or 0),
        np.float32(read.softcap or 0.0),
        _sinks(read),
        out_THV.numpy(),
    )
    items_W3 = _work_items(read)
    shares = _shares(items_W3, read)
    if len(shares) == 1:
        attend(shares[0], *arguments)
    else:
        list(_threads().map(lambda share: attend(share, *arguments), shares))
    return out_THV


def _as_numpy(pages: Tensor) -> Any:
    """The pages' memory; bf16, which numpy lacks, as its bits."""
    return pages.view(torch.uint16).numpy() if pages.dtype == torch.bfloat16 else pages.numpy()


def _sinks(read: LayerRead) -> Any:
    if read.sinks_H is None:
        return np.empty(0, np.float32)
    return read.sinks_H.detach().float().numpy()


def _work_items(read: LayerRead) -> Any:
    """(sequence, key head, first query of the tile) for every piece of work, int64 [W, 3]."""
    num_key_heads = read.keys_NKDO.shape[1]
    num_queries_S = np.diff(read.batch.query_start_S1.numpy())
    items = [
        (sequence, head, tile)
        for sequence, num_queries in enumerate(num_queries_S)
        for tile in range(0, int(num_queries), TILE)
        for head in range(num_key_heads)
    ]
    return np.array(items, dtype=np.int64).reshape(-1, 3)


def _shares(items_W3: Any, read: LayerRead) -> list[Any]:
    """The work, dealt out card by card to as many threads as it can feed."""
    contexts_S = read.batch.first_position_S.numpy() + np.diff(read.batch.query_start_S1.numpy())
    num_queries_S = np.diff(read.batch.query_start_S1.numpy())
    heads, dim = read.query_THD.shape[1:]
    work = int((contexts_S * num_queries_S).sum()) * heads * dim
    num_threads = min(
        torch.get_num_threads(), _MOST_THREADS, len(items_W3), 1 + work // _SERIAL_WORK
    )
    return [np.ascontiguousarray(items_W3[first::num_threads]) for first in range(num_threads)]


@cache
def _threads() -> ThreadPoolExecutor:
    # Python threads under a kernel without the GIL: no second OpenMP runtime beside torch's.
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="attention")
