"""`python -m benchmarks.cpu.kernels`: products and attention on one core, against its own rates.

The script first measures two rates of the core. One is that of multiply-adds on registers, in
vectors of the kernels' width. The other is that of reading memory. Each kernel's number is a share
of one of these rates, measured in the same run. The last rows are what threads cost: a call of
all of them, one that wakes them, and a barrier in a compiled kernel.

With `python -m tests.processors avx2` before the command, a newer processor plays an older one.

Shapes: K = key heads, V = value dimensions, T = flat query tokens, H = query heads.
"""

import mmap
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from torch import nn

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.cpu_kernels import huge_pages
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Ints
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, add, broadcast, fma, load, reduce_add
from ropewalk.model_runtime.cpu_kernels.target import vectors
from ropewalk.model_runtime.cpu_kernels.threads import (
    MOST_THREADS,
    barrier_wait,
    run_on_threads,
)
from ropewalk.model_runtime.layers.packed_linear import described, workshop_for
from ropewalk.model_runtime.layers.packed_product import PackedProduct
from ropewalk.model_runtime.loading.model_config import KVShape
from ropewalk.model_runtime.runner.backends import new_store
from ropewalk.rope import Profile, Unscaled, native_rope

_DTYPES = (torch.float32, torch.bfloat16)
_SHAPES = ((2048, 768), (768, 2048), (32_000, 768))  # outputs and inputs of weights of `medium`
_ROWS = (1, 4, 8, 16, 64, 256, 1024)
_HEADS, _KEY_HEADS, _DIM, _PAGE = 12, 4, 64, 64  # `medium`, and the default page size
_READS = ((8192, 1), (2048, 256), (8192, 256))  # keys, and query tokens at their end
PEAK_ROUNDS = 1 << 16
PEAK_OPERATIONS = 2 * 12 * WIDTH * PEAK_ROUNDS  # of one call of `multiply_adds`
READ_BYTES = 256 << 20
_READ_STEP = 1 << 10  # numbers; a thread reads a multiple of them
_TEAMS = (2, 16, 64)  # threads of a call; of which only the cores' number run at a time
_BARRIERS = 1000


class Rates(NamedTuple):
    """The operations and bytes that some threads of this processor reach together in a second."""

    operations: float
    read_bytes: float

    def floor(self, operations: float, num_bytes: float) -> float:
        """Return the seconds that so much work has to take."""
        return max(operations / self.operations, num_bytes / self.read_bytes)


class Row(NamedTuple):
    """A row of the table."""

    what: str
    dtype: str
    rate: str
    share: str


@jit()
def multiply_adds(rounds: int) -> Any:
    """Run twelve chains of multiply-adds, enough for two units with six pipeline stages each."""
    x, y = broadcast(np.float32(0.5)), broadcast(np.float32(0.25))
    a = b = c = d = e = f = g = h = i = j = k = m = y
    for _ in range(rounds):
        a, b, c = fma(a, x, y), fma(b, x, y), fma(c, x, y)
        d, e, f = fma(d, x, y), fma(e, x, y), fma(f, x, y)
        g, h, i = fma(g, x, y), fma(h, x, y), fma(i, x, y)
        j, k, m = fma(j, x, y), fma(k, x, y), fma(m, x, y)
    return reduce_add(add(add(add(a, b), add(c, d)), add(add(e, f), add(g, h)))) + reduce_add(
        add(add(i, j), add(k, m))
    )


@jit()
def sum_of(numbers: Any) -> Any:
    """Add numbers up, four registers at a time: the rate of this is that of reading memory."""
    first = second = third = fourth = broadcast(np.float32(0.0))
    for at in range(0, numbers.shape[0], 4 * WIDTH):
        first = add(first, load(numbers, at))
        second = add(second, load(numbers, at + WIDTH))
        third = add(third, load(numbers, at + 2 * WIDTH))
        fourth = add(fourth, load(numbers, at + 3 * WIDTH))
    return reduce_add(add(add(first, second), add(third, fourth)))


def seconds(work: Callable[[], object], least: float = 0.3, pause: float = 0.0) -> float:
    """Return the median time of a call of `work` in seconds, after a warm-up call.

    At least five calls are measured, and their times add up to `least` seconds or more. `pause`:
    the seconds before a call.
    """
    work()
    times: list[float] = []
    while len(times) < 5 or sum(times) < least:
        if pause:
            time.sleep(pause)
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def shortest_of(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest time of each work in seconds; the works take turns.

    Other work on the machine only makes times longer.
    """
    found: dict[str, list[float]] = {name: [] for name in works}
    for attempt in range(rounds + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if attempt:  # the first one compiles
                found[name].append(time.perf_counter() - begin)
    return {name: min(times) for name, times in found.items()}


def measured_rates(num_threads: int) -> Rates:
    """Measure multiply-adds on registers, and reading of memory that no cache holds."""
    num_threads = min(num_threads, MOST_THREADS)
    numbers, out_T = np.ones(READ_BYTES // 4, np.float32), np.empty(num_threads, np.float32)
    works: dict[str, Callable[[], object]] = {
        "operations": partial(run_on_threads, _multiply_add, num_threads, PEAK_ROUNDS, out_T),
        "reading": partial(run_on_threads, _sum_part, num_threads, numbers, out_T),
    }
    took = shortest_of(works, rounds=7)
    return Rates(num_threads * PEAK_OPERATIONS / took["operations"], READ_BYTES / took["reading"])


@jit()
def _multiply_add(thread: int, rounds: int, out_T: Floats) -> None:
    out_T[thread] = multiply_adds(rounds)


@jit()
def _sum_part(thread: int, numbers: Floats, out_T: Floats) -> None:
    size = numbers.shape[0] // out_T.shape[0] // _READ_STEP * _READ_STEP
    out_T[thread] = sum_of(numbers[thread * size : (thread + 1) * size])


def product_rows(peak: float, bandwidth: float) -> list[Row]:
    """Measure products of each shape: one row against memory, more against multiply-adds."""
    rows = []
    for dtype in _DTYPES:
        workshop, name = workshop_for(dtype), str(dtype).removeprefix("torch.")
        for num_outputs, num_inputs in _SHAPES:
            linear = nn.Linear(num_inputs, num_outputs, bias=False).to(dtype)
            product = PackedProduct([linear], workshop)
            num_bytes = num_outputs * num_inputs * dtype.itemsize
            for count in _ROWS:
                took = seconds(partial(product, torch.randn(count, num_inputs).to(dtype)))
                rate = 2 * count * num_outputs * num_inputs / took
                what = f"{count} x {num_inputs} x {num_outputs}"
                if count == 1:
                    share = f"{num_bytes / took / bandwidth:.0%} of reading"
                else:
                    share = f"{rate / peak:.0%} of multiply-adds"
                rows.append(Row(what, name, f"{rate / 1e9:.0f} GFLOP/s", share))
    return rows


def attention_rows(peak: float, bandwidth: float) -> list[Row]:
    """Measure one layer's attention in decoding and prefill; rotation is not counted as work."""
    rows = []
    for dtype in _DTYPES:
        for num_keys, num_queries in _READS:
            work, name = _read(dtype, num_keys, num_queries), str(dtype).removeprefix("torch.")
            took = seconds(work)
            seen = sum(range(num_keys - num_queries + 1, num_keys + 1))
            rate = 4 * _HEADS * _DIM * seen / took
            read = 2 * _KEY_HEADS * _DIM * num_keys * dtype.itemsize / took
            share = f"{rate / peak:.0%} of multiply-adds"
            if num_queries == 1:
                share += f", {read / bandwidth:.0%} of reading"
            what = f"attention, {num_queries} tokens at {num_keys} keys"
            rows.append(Row(what, name, f"{rate / 1e9:.0f} GFLOP/s", share))
    return rows


def _read(dtype: torch.dtype, num_keys: int, num_queries: int) -> Callable[[], object]:
    """Build the read of random keys by the last tokens of one sequence."""
    cpu, num_pages = torch.device("cpu"), -(-num_keys // _PAGE)
    native = native_rope({"max_position_embeddings": num_keys, "head_dim": _DIM})
    tables = RopeTables(native, _PAGE, num_keys, cpu)
    slot = tables.id_of(Profile(Unscaled()))
    layout = CacheLayout({0: KVShape(_KEY_HEADS, _DIM, _DIM)}, dtype, _PAGE)
    store = new_store(layout, num_pages, cpu)
    keys_NKDO, values_NKOV = store.pages(0)
    keys_NKDO.normal_()
    values_NKOV.normal_()
    pages = torch.randperm(num_pages).tolist()
    span = Span([0] * num_queries, num_keys - num_queries, pages, slot, range(0))
    backend = CpuAttention(build_batch([span], _PAGE, cpu))
    query_THD = torch.randn(num_queries, _HEADS, _DIM).to(dtype)
    layer = LayerRead(
        query_THD, keys_NKDO, values_NKOV, tables.layer("all"), _DIM**-0.5, None, None, None
    )
    return partial(backend.read, layer)


def thread_rows() -> list[Row]:
    """Measure a call on threads that have nothing to do, and a barrier between two of them."""
    rows = []
    for size in _TEAMS:
        took = seconds(partial(run_on_threads, _do_nothing, size))
        rows.append(Row(f"a call on {size} threads", "", f"{1e6 * took:.0f} us", ""))
    took = seconds(partial(run_on_threads, _do_nothing, 2), least=0.003, pause=0.003)
    rows.append(Row("a call on 2 threads that sleep", "", f"{1e6 * took:.0f} us", ""))
    took = seconds(_run_barriers) / _BARRIERS
    return [*rows, Row("a barrier of 2 threads", "", f"{1e6 * took:.2f} us", "")]


def _run_barriers() -> None:
    arrived = np.zeros(1, np.int64)
    run_on_threads(_wait_often, 2, arrived, 2, _BARRIERS, arrived=arrived)


@jit()
def _do_nothing(_: int) -> None:
    pass


@jit()
def _wait_often(_: int, arrived: Ints, num_threads: int, count: int) -> None:
    barrier = 1
    while barrier <= count:
        barrier = barrier_wait(arrived, barrier, num_threads)


def _small_pages(num_bytes: int) -> huge_pages.Bytes:
    """Return memory as the system gives it to a program that asks for no huge pages."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _ones(memory: huge_pages.Bytes) -> Floats:
    """Return the memory as numbers, each written, because what is not written is not read."""
    numbers = memory.view(np.float32)
    numbers[:] = 1
    return numbers


@click.command(help=__doc__.partition("\n")[0])
def main() -> None:
    """Print the rates and shares as a Markdown table."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    peak = PEAK_OPERATIONS / seconds(partial(multiply_adds, PEAK_ROUNDS))
    bandwidth = READ_BYTES / seconds(partial(sum_of, _ones(huge_pages.zeros(READ_BYTES))))
    small = READ_BYTES / seconds(partial(sum_of, _ones(_small_pages(READ_BYTES))))
    ways = {dtype: described([workshop_for(dtype).way], dtype) for dtype in _DTYPES}
    lines = [
        f"{vectors().name}, {vectors().lanes} lanes; multiply-adds {peak / 1e9:.0f} GFLOP/s, "
        f"reading {bandwidth / 1e9:.1f} GB/s, {small / 1e9:.1f} in pages of 4 KiB; "
        f"{ways[torch.float32]}; {ways[torch.bfloat16]}",
        "",
        "| work | dtype | rate | share |",
        "| --- | --- | ---: | ---: |",
    ]
    rows = [
        *product_rows(peak, bandwidth),
        *attention_rows(peak, bandwidth),
        *thread_rows(),
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
