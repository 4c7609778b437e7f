"""Threads that run compiled kernels beside each other.

The threads are Python's, because a kernel releases the interpreter's lock. A second OpenMP runtime
would compete with torch's for the cores.

Some kernels have stages, and each stage needs the complete result of the one before. Such a kernel
runs on every thread of a team. Each thread computes a part of every stage, and a barrier separates
the stages. A barrier takes a microsecond if each thread has a core of its own. A thread that waits
longer yields its core, because a thread that it waits for may need the core.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import address_of

MOST_THREADS = 64  # started as they are needed

Share = TypeVar("Share")

_team = threading.Lock()


def parallel_for(
    work: Callable[[Share], None],
    shares: Sequence[Share],
    give_up: Callable[[], None] | None = None,
) -> None:
    """Call `work` for each share, the first of them on the calling thread.

    An error in any call is raised after all calls have ended. `give_up` is called first if a call
    fails or cannot be started. It must release the calls that wait for the failed one.
    """
    if len(shares) == 1:  # a decode step has dozens of these
        work(shares[0])
        return

    def guarded(share: Share) -> None:
        try:
            work(share)
        except BaseException:
            if give_up is not None:
                give_up()
            raise

    first, *others = shares
    waiting: list[Future[None]] = []
    try:
        for share in others:
            waiting.append(_threads().submit(guarded, share))  # noqa: PERF401  # each that started
        work(first)
    except BaseException:
        if give_up is not None:
            give_up()
        raise
    finally:
        wait(waiting)
    for each in waiting:
        each.result()


def run_thread_team(work: Callable[[int], None], size: int, give_up: Callable[[], None]) -> None:
    """Call `work` with 0 to `size` - 1 at the same time, so that the calls may wait for each other.

    Only one team runs at a time, because two teams could wait for each other's threads. `give_up`
    must end the waiting of all calls.
    """
    with _team:
        parallel_for(work, range(size), give_up)


def even_shares(size: int, unit: int, most: int) -> list[tuple[int, int]]:
    """Return at most `most` ranges that are `size` together, at multiples of `unit`."""
    num_units = size // unit
    num_shares = max(1, min(most, num_units, MOST_THREADS))
    edges = [num_units * share // num_shares * unit for share in range(num_shares + 1)]
    return list(pairwise(edges))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="kernel")


ABORT = 1 << 62  # written to the arrival count, it releases every barrier after a thread has failed

_SPINS = 2000  # reads of the count before the thread yields its core

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def take_next(typingctx: Any, taken: Any) -> Any:  # noqa: ARG001
    """Add one to the array's only element, and return what it was; no two threads get the same."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, taken, values[0], ir.Constant(ir.IntType(64), 0))
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(taken), code


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typingctx: Any, arrived: Any) -> Any:  # noqa: ARG001
    """Add one to the array's only element; a thread that reads the sum sees all earlier writes."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, arrived, values[0], ir.Constant(ir.IntType(64), 0))
        builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")
        return context.get_dummy_value()

    return types.none(arrived), code


@intrinsic  # type: ignore[untyped-decorator]
def _look(typingctx: Any, arrived: Any) -> Any:  # noqa: ARG001
    """Return the array's only element."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, arrived, values[0], ir.Constant(ir.IntType(64), 0))
        return builder.load_atomic(pointer, "seq_cst", align=8)

    return types.int64(arrived), code


@jit()
def barrier_wait(arrived: Any, barrier: int, num_threads: int) -> int:
    """Wait until all threads are at barrier number `barrier`; return the next barrier's number.

    Barriers are numbered from 1. `arrived`: int64 [1], 0 before the first barrier, the same array
    for all threads.
    """
    if num_threads > 1:
        _arrive(arrived)
        spins = 0
        while _look(arrived) < barrier * num_threads:
            spins += 1
            if spins > _SPINS:
                _yield_core()
    return barrier + 1
