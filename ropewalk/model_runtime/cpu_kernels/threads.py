"""Threads that run compiled kernels beside each other.

The threads are Python's, but each of them stays in a compiled loop that waits for work, without the
interpreter's lock. A second OpenMP runtime would compete with torch's for the cores. A thread that
has found no work for a while sleeps until the next call.

A kernel gets the number of its thread. Some kernels have stages, and each stage needs the complete
result of the one before. Each thread computes a part of every stage, and a barrier separates the
stages. A barrier takes a microsecond if each thread has a core of its own. A thread that waits
longer yields its core, because a thread that it waits for may need the core.
"""

import _thread
import os
import threading
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.jit import described, jit
from ropewalk.model_runtime.cpu_kernels.simd import address_of, pointer_to

MOST_THREADS = 64  # started as they are needed

ABORT = 1 << 62  # written to the arrival count, it releases every barrier after a thread has failed

_SPINS = 2000  # reads of a number before a thread yields its core
_YIELDS = 500  # before it sleeps; about 0.2 ms, longer than the code between two calls takes

# Fields of a thread's mailbox, in three lines of 64 bytes. The caller writes the first, and a call
# adds one to the ticket.
_TICKET, _FUNCTION, _BLOCK, _THREAD, _ARRIVED, _WAKE = range(6)
_DONE, _STATUS = 8, 9  # the thread's: the last ticket, and what its function returned
_SLEEPS = 16  # set by the thread, cleared by the caller that wakes it, or by the thread
_BYTE = 17  # that wakes the thread
_BOX, _LINE = 24, 8

_team = threading.Lock()
_unaligned = np.zeros(MOST_THREADS * _BOX + _LINE, np.int64)
_boxes = _unaligned[-_unaligned.ctypes.data % 64 // 8 :][: MOST_THREADS * _BOX]
_num_started = 1  # the calling thread is the first, and has no mailbox


def run_on_threads(kernel: Any, num_threads: int, *arguments: Any, arrived: Any = None) -> None:
    """Call `kernel(thread, *arguments)` with 0 to `num_threads` - 1 at the same time.

    The calling thread is number 0. Only one call with several threads runs at a time. Kernels that
    wait for each other (`barrier_wait`) are given the array of their barriers as `arrived`, too, so
    that a failure releases them. Raises MemoryError after all threads have ended, if one failed,
    and RuntimeError if a thread cannot be started.
    """
    run = _runner(kernel)
    arrived = np.zeros(1, np.int64) if arrived is None else arrived
    if num_threads == 1:  # a step of few rows on one thread has dozens of these
        has_failed = run(_boxes, 1, arrived, arguments)
    else:
        with _team:
            _start(num_threads)
            has_failed = run(_boxes, num_threads, arrived, arguments)
    if has_failed:
        raise MemoryError("a kernel failed, as a rule because there is no memory for its results")


def run_shares(kernel: Any, shares: Sequence[tuple[int, int]], *arguments: Any) -> None:
    """Call `kernel(*arguments, begin, end)` for each share at the same time.

    Errors are those of `run_on_threads`.
    """
    edges_T2 = np.array(shares, np.int64)
    run_on_threads(_by_shares(kernel), len(shares), edges_T2, arguments)


def run_items(kernel: Any, items_of_threads: Sequence[Any], *arguments: Any) -> None:
    """Call `kernel(items, *arguments)` for each thread's array of work items at the same time.

    Errors are those of `run_on_threads`.
    """
    edges_E = np.cumsum([0, *map(len, items_of_threads)])
    items = np.concatenate(items_of_threads)
    run_on_threads(_by_items(kernel), len(items_of_threads), edges_E, items, arguments)


def num_threads_for(most: int) -> int:
    """Return how many threads a call may have; `most` is what its work is worth."""
    return max(1, min(most, torch.get_num_threads(), MOST_THREADS))


def even_shares(size: int, unit: int, most: int) -> list[tuple[int, int]]:
    """Return at most `most` ranges that are `size` together, at multiples of `unit`."""
    num_units = size // unit
    num_shares = max(1, min(most, num_units, MOST_THREADS))
    edges = [num_units * share // num_shares * unit for share in range(num_shares + 1)]
    return list(pairwise(edges))


@cache
def _by_shares(kernel: Any) -> Any:
    """Compiled: a kernel on a range, as a kernel of a thread."""

    @jit()
    def run_share(thread: int, edges_T2: Any, arguments: Any) -> None:
        kernel(*arguments, edges_T2[thread, 0], edges_T2[thread, 1])

    return run_share


@cache
def _by_items(kernel: Any) -> Any:
    """Compiled: a kernel on work items, as a kernel of a thread."""

    @jit()
    def run_own(thread: int, edges_E: Any, items: Any, arguments: Any) -> None:
        kernel(items[edges_E[thread] : edges_E[thread + 1]], *arguments)

    return run_own


def _start(num_threads: int) -> None:
    """Start the threads that are missing. They end with the process."""
    global _num_started  # noqa: PLW0603  # under the lock of teams
    if num_threads > MOST_THREADS:
        raise RuntimeError(f"a call has at most {MOST_THREADS} threads. Given: {num_threads}")
    if _num_started < num_threads:  # compiled here, because a thread could not raise its error
        serve: Any = _serve
        serve.compile((types.int64[::1], types.int64, types.int32))
    while _num_started < num_threads:
        base = _num_started * _BOX
        sleeps, wakes = os.pipe()
        _boxes[base + _WAKE] = wakes
        _num_started += 1  # first, because an interrupt must not start a thread twice
        try:
            _thread.start_new_thread(_serve, (_boxes, base, np.int32(sleeps)))
        except RuntimeError:
            _num_started -= 1
            os.close(sleeps)
            os.close(wakes)
            raise


def _forget_threads() -> None:
    """Start anew in a forked process, which has none of its parent's threads."""
    global _num_started, _team
    _num_started, _team = 1, threading.Lock()
    _boxes.fill(0)


os.register_at_fork(after_in_child=_forget_threads)


_yield_core = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.intp(types.int32, types.uintp, types.uintp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.uintp, types.uintp))


def _atomic_add(ordering: str) -> Any:
    """Return an intrinsic that adds one to a number of an array, and returns what it was."""

    @intrinsic  # type: ignore[untyped-decorator]
    def add(typingctx: Any, numbers: Any, at: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            pointer = address_of(context, builder, numbers, *values)
            return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), ordering)

        return types.int64(numbers, at), code

    return add


take_next = _atomic_add("monotonic")  # no two threads get the same
_arrive = _atomic_add("seq_cst")  # a thread that reads the sum sees all earlier writes


@intrinsic  # type: ignore[untyped-decorator]
def _look(typingctx: Any, numbers: Any, at: Any) -> Any:  # noqa: ARG001
    """Return a number of an array, as another thread last wrote it."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, numbers, *values)
        return builder.load_atomic(pointer, "seq_cst", align=8)

    return types.int64(numbers, at), code


@intrinsic  # type: ignore[untyped-decorator]
def _exchange(typingctx: Any, numbers: Any, at: Any, value: Any) -> Any:  # noqa: ARG001
    """Write a number of an array, and return what it was."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = address_of(context, builder, numbers, *values[:2])
        return builder.atomic_rmw("xchg", pointer, values[2], "seq_cst")

    return types.int64(numbers, at, types.int64), code


@jit()
def _wait_for(numbers: Any, at: int, least: int) -> None:
    """Wait until a number of an array is `least` or more."""
    spins = 0
    while _look(numbers, at) < least:
        spins += 1
        if spins > _SPINS:
            _yield_core()


@jit()
def barrier_wait(arrived: Any, barrier: int, num_threads: int) -> int:
    """Wait until all threads are at barrier number `barrier`; return the next barrier's number.

    Barriers are numbered from 1. `arrived`: int64 [1], 0 before the first barrier, the same array
    for all threads.
    """
    if num_threads > 1:
        _arrive(arrived, 0)
        _wait_for(arrived, 0, barrier * num_threads)
    return barrier + 1


_FUNCTION_TYPE = ir.FunctionType(ir.IntType(32), [ir.IntType(64), ir.IntType(64)])


@intrinsic  # type: ignore[untyped-decorator]
def _call(typingctx: Any, function: Any, block: Any, thread: Any) -> Any:  # noqa: ARG001
    """Call a function that `_prepared` has made; return 0 if it has not failed."""

    def code(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        function = builder.inttoptr(values[0], _FUNCTION_TYPE.as_pointer())
        return builder.sext(builder.call(function, values[1:]), ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), code


def _prepared(kernel: Any) -> Any:
    """Return an intrinsic that lets any thread call a kernel with the same arguments.

    It stores the arguments in the frame of the function that uses it, and returns the addresses of
    a function for `_call` and of these arguments. They are valid as long as that frame, so it has
    to wait for all threads before it returns.
    """

    def prepared(typingctx: Any, arguments: Any) -> Any:
        wanted = types.Dispatcher(kernel).get_call_type(
            typingctx, (types.int64, *arguments.types), {}
        )

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = kernel.inner.overloads[wanted.args]
            context.add_linking_libs([made.library])
            name = builder.module.get_unique_name("call_of_a_thread")
            function = ir.Function(builder.module, _FUNCTION_TYPE, name)
            function.linkage = "internal"
            inside = ir.IRBuilder(function.append_basic_block())
            kind = context.get_value_type(arguments)
            given = inside.load(inside.inttoptr(function.args[0], kind.as_pointer()))
            each = [function.args[1], *cgutils.unpack_tuple(inside, given, len(arguments))]
            status, _ = context.call_internal_no_propagate(inside, made.fndesc, wanted, each)
            inside.ret(status.code)
            block = cgutils.alloca_once_value(builder, values[0])
            addresses = [builder.ptrtoint(each, ir.IntType(64)) for each in (function, block)]
            return context.make_tuple(builder, signature.return_type, addresses)

        return types.UniTuple(types.int64, 2)(arguments), code

    # A runner's code is kept under this name.
    prepared.__name__ = described(kernel)
    return intrinsic(prepared)


@cache
def _runner(kernel: Any) -> Any:
    """Compiled: calls of a kernel by the threads of a team."""
    prepared = _prepared(kernel)

    @jit()
    def run(boxes_F: Any, num_threads: int, arrived: Any, arguments: Any) -> bool:
        function, block = prepared(arguments)
        for thread in range(1, num_threads):
            base = thread * _BOX
            boxes_F[base + _FUNCTION], boxes_F[base + _BLOCK] = function, block
            boxes_F[base + _THREAD], boxes_F[base + _ARRIVED] = thread, arrived.ctypes.data
            _arrive(boxes_F, base + _TICKET)
            if _exchange(boxes_F, base + _SLEEPS, 0):
                _write(np.int32(boxes_F[base + _WAKE]), boxes_F.ctypes.data, 1)
        has_failed = _call(function, block, 0) != 0
        if has_failed:
            _exchange(arrived, 0, ABORT)
        for thread in range(1, num_threads):
            base = thread * _BOX
            _wait_for(boxes_F, base + _DONE, boxes_F[base + _TICKET])
            has_failed |= boxes_F[base + _STATUS] != 0
        return bool(has_failed)

    return run


@jit()
def _sleep(boxes_F: Any, base: int, ticket: int, sleeps: Any) -> None:
    """Wait for a ticket without a core. The caller writes a byte if it has seen the flag."""
    _exchange(boxes_F, base + _SLEEPS, 1)
    if _look(boxes_F, base + _TICKET) < ticket or not _exchange(boxes_F, base + _SLEEPS, 0):
        byte = boxes_F.ctypes.data + 8 * (base + _BYTE)  # a new array could fail
        while _read(sleeps, byte, 1) != 1:  # a signal interrupts it
            pass


@jit()
def _serve(boxes_F: Any, base: int, sleeps: Any) -> None:
    """Run what is put into a mailbox. `sleeps`: the end of a pipe that the caller writes to."""
    ticket = boxes_F[base + _DONE] + 1
    while True:
        spins = 0
        while _look(boxes_F, base + _TICKET) < ticket:
            spins += 1
            if spins > _SPINS:
                _yield_core()
            if spins > _SPINS + _YIELDS:
                _sleep(boxes_F, base, ticket, sleeps)
        thread = boxes_F[base + _THREAD]
        status = _call(boxes_F[base + _FUNCTION], boxes_F[base + _BLOCK], thread)
        if status != 0:
            arrived = carray(pointer_to(boxes_F[base + _ARRIVED], boxes_F), 1)
            _exchange(arrived, 0, ABORT)
        boxes_F[base + _STATUS] = status
        _arrive(boxes_F, base + _DONE)
        ticket += 1
