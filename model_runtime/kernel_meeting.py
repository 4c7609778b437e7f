"""Where threads of one compiled kernel wait for each other, for numba.

A kernel whose parts need all of what stands before them runs on every thread of a team, each with a
share of every part, and the threads meet in between. That takes a microsecond where each has a core
of its own; one that waits longer gives its core away, for it may be the one that another needs.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from model_runtime.compiled import jit
from model_runtime.lanes import address_of

OVER = 1 << 62  # put where arrivals are counted, it ends all meetings: somebody does not come

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
def meet(arrived: Any, meeting: int, num_threads: int) -> int:
    """Wait until all threads are at the meeting of this number, from 1; returns the next number.

    `arrived`: int64 [1], 0 before the first meeting, the same array for all of them.
    """
    if num_threads > 1:
        _arrive(arrived)
        spins = 0
        while _look(arrived) < meeting * num_threads:
            spins += 1
            if spins > _SPINS:
                _yield_core()
    return meeting + 1
