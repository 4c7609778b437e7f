"""The launches of a trace, and the place of each value in the memory of a step.

A sum and the norm that reads it are one launch, with the norm of a summand before it if there is
one. Values share one piece of memory. A value's columns are free again after its last read.

Shapes: R = rows, C = columns of a value.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.gpu.gate import Activation, activate_into, gate_into
from ropewalk.model_runtime.gpu.rms_norm import Scale, normalize_into
from ropewalk.model_runtime.layers.joined_linears import joined_weight
from ropewalk.model_runtime.layers.low_bits.stored import StoredLinear
from ropewalk.model_runtime.tracing.operations import (
    Activate,
    Attend,
    Call,
    Combine,
    Linears,
    Norm,
    Operand,
    Operation,
    Product,
    Trace,
    UntraceableError,
)
from ropewalk.model_runtime.tracing.passes import operands_of

_ALIGNED = 32  # columns; so that rows of memory begin at whole cache lines
_COMBINED: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
}


# Returns what writes the product of linears: it takes the output and the rows.
Multiply = Callable[[Linears], Callable[..., Any]]


class Run(NamedTuple):
    """Columns beside each other in one value."""

    value: int
    first: int
    width: int


@dataclass(slots=True)
class Launch:
    """One launch, or a layer's attention, or a module."""

    writes: tuple[int, ...]  # values
    reads: tuple[Run, ...]
    run: Callable[..., Any]  # takes tensors of what it writes, then of what it reads
    attends: Attend | None = None
    module: Any = None  # called with what it reads; it returns a tensor of its own


def launches_of(
    trace: Trace, multiply: Multiply | None = None
) -> tuple[list[Launch], dict[int, int]]:
    """Return the launches of a trace, the head's last, and the width of each value.

    `multiply`: makes the launch of linears; None: by torch.
    Raises UntraceableError for an operation without a launch.
    """
    assert trace.head is not None
    operations: list[Operation] = [*trace.operations, trace.head]
    widths = {each.out.number: each.out.num_columns for each in operations}
    widths[trace.embedding.number] = trace.embedding.num_columns
    reads = Counter(
        int(value) for each in operations for operand in operands_of(each)
        for value in np.unique(operand.values_C)
    )  # fmt: skip
    made = {each.out.number: each for each in operations}
    norms = _norms_of_sums(operations, widths)
    inner = {
        place: scale
        for sum_, (place, scale) in _inner_norms(operations, norms, made, reads).items()
    }
    launches: list[Launch] = []
    for each in operations:
        out = each.out.number
        if out in inner or out in {norm.out.number for norm in norms.values()}:
            continue  # a part of a sum's launch
        if isinstance(each, Combine) and out in norms:
            launches.append(_sum_and_norm(each, norms[out], inner, made))
        else:
            launches.append(_launch(each, multiply or _product))
    return launches, widths


def _norms_of_sums(operations: Sequence[Operation], widths: dict[int, int]) -> dict[int, Norm]:
    """Return the norm that is computed with each sum of two values."""
    sums = {
        each.out.number
        for each in operations
        if isinstance(each, Combine) and each.name == "add" and isinstance(each.other, Operand)
        if all(_is_whole(run_of(operand), widths) for operand in (each.x, each.other))
    }
    found: dict[int, Norm] = {}
    for each in operations:
        if isinstance(each, Norm):
            run = run_of(each.x)
            if run.value in sums and run.width == widths[run.value] == len(each.norm.weight_D):
                found.setdefault(run.value, each)
    return found


def _is_whole(run: Run, widths: dict[int, int]) -> bool:
    return run.width == widths[run.value]


def _inner_norms(
    operations: Sequence[Operation],
    norms: dict[int, Norm],
    made: dict[int, Operation],
    reads: Counter[int],
) -> dict[int, tuple[int, Scale]]:
    """Return the norm of a summand that nothing else reads, by sum: its value and its scale."""
    found = {}
    for each in operations:
        if not isinstance(each, Combine) or each.out.number not in norms:
            continue
        assert isinstance(each.other, Operand)
        for operand in (each.other, each.x):
            run = run_of(operand)
            norm = made.get(run.value)
            is_whole = isinstance(norm, Norm) and len(norm.norm.weight_D) == run.width
            if is_whole and reads[run.value] == 1:
                found[each.out.number] = run.value, norm.norm  # type: ignore[union-attr]
                break
    return found


def _sum_and_norm(
    each: Combine, norm: Norm, inner: dict[int, Scale], made: dict[int, Operation]
) -> Launch:
    assert isinstance(each.other, Operand)
    residual, x = run_of(each.x), run_of(each.other)
    if residual.value in inner:
        residual, x = x, residual
    inner_scale = inner.get(x.value)
    if inner_scale is not None:
        before = made[x.value]
        assert isinstance(before, Norm)
        x = run_of(before.x)
    scale = norm.norm

    def launch(summed: Tensor, out: Tensor, residual_RC: Tensor, x_RC: Tensor) -> None:
        normalize_into(
            x_RC, scale, out, residual_RC=residual_RC, summed_RC=summed, inner=inner_scale
        )

    return Launch((each.out.number, norm.out.number), (residual, x), launch)


def _launch(each: Operation, multiply: Multiply) -> Launch:
    """Return the launch of one operation. Raises UntraceableError."""
    function: Callable[..., Any] = _nothing
    runs: tuple[Run, ...]
    attends, module = None, None
    if isinstance(each, Product):
        function, runs = multiply(each.linears), (run_of(each.x),)
    elif isinstance(each, Norm):
        function, runs = _norm(each.norm), (run_of(each.x),)
    elif isinstance(each, Activate):
        function, runs = _activated(each)
    elif isinstance(each, Combine):
        function, runs = _combined(each)
    elif isinstance(each, Attend):
        runs, attends = tuple(map(run_of, (each.query, each.key, each.value))), each
    elif isinstance(each, Call):
        runs, module = (run_of(each.x),), each.module
    else:
        raise UntraceableError(f"has no launch for {type(each).__name__}")
    return Launch((each.out.number,), runs, function, attends, module)


def _norm(scale: Scale) -> Callable[..., Any]:
    return lambda out, x: normalize_into(x, scale, out)


def _combined(each: Combine) -> tuple[Callable[..., Any], tuple[Run, ...]]:
    function = _COMBINED[each.name]
    if isinstance(each.other, Operand):
        runs = run_of(each.x), run_of(each.other)
        return (lambda out, x, other: function(x, other, out=out)), runs
    return _with_constant(function, each.other), (run_of(each.x),)


def _nothing(*_: Tensor) -> None:
    pass


def _product(linears: Linears) -> Callable[..., Any]:
    """Lay out the weight of linears, whose own weights become views of it."""
    if any(isinstance(each, StoredLinear) for each in linears.modules):
        return lambda out, x: torch.cat([each(x) for each in linears.modules], dim=-1, out=out)
    weight_NK, bias_N = joined_weight(linears.modules)
    weight_KN = weight_NK.t()
    if bias_N is None:
        return lambda out, x: torch.mm(x, weight_KN, out=out)
    return lambda out, x: torch.addmm(bias_N, x, weight_KN, out=out)


def _activated(each: Activate) -> tuple[Callable[..., Any], tuple[Run, ...]]:
    """Return the launch of a gate, whose halves are beside each other, or else two of torch."""
    activation, x = Activation(each.kind), run_of(each.x)
    if each.up is None:
        return (lambda out, x: activate_into(x, out, activation)), (x,)
    up = run_of(each.up)
    if up == (x.value, x.first + x.width, x.width):
        joined = Run(x.value, x.first, 2 * x.width)
        return (lambda out, joined: gate_into(joined, out, activation)), (joined,)

    def launch(out: Tensor, x_RC: Tensor, up_RC: Tensor) -> None:
        activate_into(x_RC, out, activation)
        torch.mul(out, up_RC, out=out)

    return launch, (x, up)


def _with_constant(
    function: Callable[..., Any], constant_C: np.ndarray[Any, Any]
) -> Callable[..., Any]:
    """Return a launch with a constant row, which the first launch brings to the device."""
    known: list[Tensor] = []

    def launch(out: Tensor, x: Tensor) -> None:
        if not known:  # before a capture, because the self-check runs first
            known.append(torch.from_numpy(constant_C).to(out.device, out.dtype))
        function(x, known[0], out=out)

    return launch


def run_of(operand: Operand) -> Run:
    """Return an operand as columns beside each other. Raises UntraceableError."""
    value, first = int(operand.values_C[0]), int(operand.columns_C[0])
    num = len(operand.columns_C)
    beside = np.arange(first, first + num)
    if (operand.values_C != value).any() or (operand.columns_C != beside).any():
        raise UntraceableError("reads columns that are not beside each other")
    return Run(value, first, num)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of each value in a step's memory, and how many columns this has."""

    first_of: dict[int, int]  # by value; none of values with tensors of their own
    num_columns: int


def lay_out(launches: Sequence[Launch], widths: dict[int, int], outside: set[int]) -> Layout:
    """Give every value columns that no other value has while it is needed.

    `outside`: values that have tensors of their own.
    """
    last = {value: place for place, each in enumerate(launches) for value, _, _ in each.reads}
    first_of: dict[int, int] = {}
    live: list[
        tuple[int, int, int]
    ] = []  # begin and end of columns, and the place of the last read
    num_columns = 0
    for place, each in enumerate(launches):
        live = [taken for taken in live if taken[2] >= place]
        for value in each.writes:
            if value in outside:
                continue
            width = -(-widths[value] // _ALIGNED) * _ALIGNED
            begin = 0
            for taken in sorted(live):
                if begin + width <= taken[0]:
                    break
                begin = max(begin, taken[1])
            live.append((begin, begin + width, last.get(value, place)))
            first_of[value] = begin
            num_columns = max(num_columns, begin + width)
    return Layout(first_of, num_columns)
