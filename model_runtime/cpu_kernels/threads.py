"""Threads that run compiled kernels beside each other.

Python's threads, since a kernel lets go of the interpreter's lock: a second OpenMP runtime beside
torch's would fight it for the cores.

A kernel whose parts need all of what stands before them runs on every thread of a team, each with a
share of every part, and the threads meet in between. That takes a microsecond if each has a core of
its own. A thread that waits longer yields its core, because a thread it waits for may need it.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from model_runtime.cpu_kernels.jit import jit
from model_runtime.cpu_kernels.simd import address_of

MOST_THREADS = 64  # started as they are needed

Share = TypeVar("Share")

_team = threading.Lock()


def parallel_for(
    work: Callable[[Share], None],
    shares: Sequence[Share],
    give_up: Callable[[], None] | None = None,
) -> None:
    """Call `work` for each share, one of them here; an error in any is raised when all have ended.

    `give_up`: called first when one fails, or cannot be started, for others that wait for it.
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
    """Call `work` with 0 to `size` - 1, all at the same time, so that they may wait for each other.

    One team at a time: of two, each could wait for threads that the other has. `give_up` must end
    the waiting of all.
    """
    with _team:
        parallel_for(work, range(size), give_up)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="kernel")


ABORT = 1 << 62  # put where arrivals are counted, it ends all meetings: somebody does not come

_SPINS = 2000  # looks before the core is given away

_yield_core = types.ExternalFunction("sched_yield", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def _arrive(typingctx: Any, arrived: Any) -> Any:  # noqa: ARG001
    """Add one to the array's only number; what was written before is seen by who sees it."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, arrived, values[0], ir.Constant(ir.IntType(64), 0))
        builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")
        return context.get_dummy_value()

    return types.none(arrived), code


@intrinsic  # type: ignore[untyped-decorator]
def _look(typingctx: Any, arrived: Any) -> Any:  # noqa: ARG001
    """The array's only number."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, arrived, values[0], ir.Constant(ir.IntType(64), 0))
        return builder.load_atomic(pointer, "seq_cst", align=8)

    return types.int64(arrived), code


@jit()
def barrier_wait(arrived: Any, barrier: int, num_threads: int) -> int:
    """Wait until all threads are at the meeting of this number, from 1; returns the next number.

    `arrived`: int64 [1], 0 before the first meeting, the same array for all of them.
    """
    if num_threads > 1:
        _arrive(arrived)
        spins = 0
        while _look(arrived) < barrier * num_threads:
            spins += 1
            if spins > _SPINS:
                _yield_core()
    return barrier + 1
