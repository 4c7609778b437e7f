"""Position methods on a GPU: one layer's decode and prefill, beside the native read."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import first_seconds, seconds
from benchmarks.gpu.inputs import PAGE_SIZE, Cache
from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.rope import DualChunk, PositionMethod, ReRope, SelfExtend, Shifted, Sinks

_PARTS_OF_CONTEXT = 4  # a context is this many times the trained length
_MOST_ERROR = 1e-2
_CHECKED = 2048  # the longest context that is compared with the reference


def methods_for(context: int) -> list[PositionMethod]:
    """Return every method, with windows and chunks for a context of four trained lengths."""
    trained = max(2 * PAGE_SIZE, context // _PARTS_OF_CONTEXT)
    chunk, window = max(1, trained * 5 // 8 // PAGE_SIZE) * PAGE_SIZE, trained // 2
    return [
        DualChunk(chunk + trained // 8, trained // 8),
        ReRope(window),
        SelfExtend(window, 16),
        Shifted(trained // 3, trained // 8),
        Sinks(4, trained - 4),
    ]


def measure_positions(cache: Cache) -> Iterator[dict[str, Any]]:
    """Yield a row for each method and read; the native ones come before any table has a method.

    Raises ValueError if a method's answer differs from the reference's.
    """
    sizes = cache.sizes
    context, sequences = sizes.tuned[len(sizes.tuned) // 2]
    first, num_tokens = sizes.prompts[1]
    decode, prefill = f"{sequences} x {context:,}", f"{num_tokens:,} after {first:,}"

    def batches() -> list[tuple[str, list[Batch]]]:
        return [
            (decode, cache.decode_batches(((context, sequences),))),
            (prefill, [cache.chunk_batch(first, num_tokens)]),
        ]

    native_s: dict[str, float] = {}

    def rows(method: str, error: float) -> Iterator[dict[str, Any]]:
        for read, made in batches():
            first_s, took = _timed(cache, made)
            yield {
                "part": "positions",
                "method": method,
                "read": read,
                "seconds": took,
                "first_s": first_s,
                "over_native": took / native_s.setdefault(read, took),
                "error": error,
            }

    yield from rows("native", 0.0)
    own_id = cache.table_id
    for method in methods_for(context):
        cache.table_id = cache.tables.id_of(replace(cache.profile, positions=method))
        yield from rows(method.method, _error(cache, method.method))
    cache.table_id = own_id
    # The price that a native request pays for the methods of others.
    yield from rows("native, beside methods", 0.0)


def _timed(cache: Cache, batches: list[Batch]) -> tuple[float, float]:
    """Return the time of the first call, and the median of a replay, lists made before."""
    read = cache.read(len(batches[0].page_T))
    works = [partial[Tensor](TritonAttention(batch).read, read) for batch in batches]
    first_s = first_seconds(cache.device, works[0])
    for work in works:
        work()
    return first_s, seconds(cache.device, works, cache.sizes.repeats)


def _error(cache: Cache, method: str) -> float:
    """Return the larger relative difference to the reference read, of a decode and a prompt."""
    first, num_tokens = cache.sizes.prompts[1]
    context = min(first + num_tokens, _CHECKED)
    worst = 0.0
    for batch in (
        cache.decode_batches(((context, 1),))[0],
        cache.chunk_batch(context - min(num_tokens, context // 2), min(num_tokens, context // 2)),
    ):
        read = cache.read(len(batch.page_T))
        exact = TorchAttention(batch).read(read)
        got = TritonAttention(batch).read(read).float()
        worst = max(worst, float(torch.linalg.norm(got - exact) / torch.linalg.norm(exact)))
    if not worst < _MOST_ERROR:
        raise ValueError(f"{method} differs by {worst:.3g} from the reference")
    return worst
