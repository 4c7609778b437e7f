"""Passes over the operations of a trace, which join what one kernel can compute.

Shapes: C = columns of a value.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ropewalk.model_runtime.tracing.operations import (
    Activate,
    Combine,
    Linears,
    Operand,
    Operation,
    Product,
    Trace,
    Value,
)

# Returns whether linears can be one product: they are of one kind, and no two share a weight.
CanJoin = Callable[[Sequence[Any]], bool]


def merge_products(trace: Trace, can_join: CanJoin) -> None:
    """Let products that follow each other and read one operand become one product, in place.

    Their values become columns of the merged one. A linear that is called several times stays
    alone, because its weight would be laid out several times.
    """
    merged: dict[int, tuple[Value, int]] = {}  # number of a value -> the merged one, and its column
    operations: list[Operation] = []
    for group in _groups(trace, can_join):
        products = [each for each in group if isinstance(each, Product)]
        if len(products) < 2:
            operations += group
            continue
        linears = Linears(tuple(each.linears.modules[0] for each in products))
        first = products[0]
        out = Value(linears.out_features, first.out.number)
        at = 0
        for each in products:
            merged[each.out.number] = out, at
            at += each.out.num_columns
        others = [each for each in group if not isinstance(each, Product)]
        operations += [replace(first, out=out, linears=linears), *others]
    trace.operations[:] = [_moved(each, merged) for each in operations]
    if trace.head is not None:
        trace.head = _moved(trace.head, merged)


def _groups(trace: Trace, can_join: CanJoin) -> list[list[Operation]]:
    """Return the operations in order, cut before each product that begins another group."""
    products = [each for each in trace.operations if isinstance(each, Product)]
    counts = Counter(id(each.linears.modules[0]) for each in products)
    groups: list[list[Operation]] = [[]]
    before: list[Product] = []
    for each in trace.operations:
        if isinstance(each, Product):
            joined = [*before, each]
            is_same = before and all(
                np.array_equal(one, other)
                for one, other in zip(_columns(before[0].x), _columns(each.x), strict=True)
            )
            linears = [one.linears.modules[0] for one in joined]
            if is_same and all(counts[id(one)] == 1 for one in linears) and can_join(linears):
                before = joined
            else:
                before = [each]
                groups.append([])
        groups[-1].append(each)
    return groups


def _columns(operand: Operand) -> tuple[Any, Any]:
    return operand.values_C, operand.columns_C


def join_gates(trace: Trace) -> None:
    """Let an activation and the product of its result with other columns be one, in place."""
    reads = Counter(
        int(value)
        for each in [*trace.operations, *([trace.head] if trace.head else [])]
        for operand in operands_of(each)
        for value in np.unique(operand.values_C)
    )
    activations = {
        each.out.number: each
        for each in trace.operations
        if isinstance(each, Activate) and each.up is None and reads[each.out.number] == 1
    }
    joined: set[int] = set()
    for place, each in enumerate(trace.operations):
        gate = _gate(each, activations)
        if gate is not None:
            number, trace.operations[place] = gate
            joined.add(number)
    trace.operations[:] = [each for each in trace.operations if each.out.number not in joined]


def _gate(each: Operation, activations: Mapping[int, Activate]) -> tuple[int, Activate] | None:
    """Return the value of an activation that is multiplied here, and both as one; None: no gate."""
    if not isinstance(each, Combine) or each.name != "multiply":
        return None
    if not isinstance(each.other, Operand):
        return None
    for operand, other in ((each.x, each.other), (each.other, each.x)):
        active = activations.get(int(operand.values_C[0]))
        if active is None:
            continue
        whole = np.arange(active.out.num_columns)
        is_whole = (operand.values_C == active.out.number).all()
        if is_whole and np.array_equal(operand.columns_C, whole):
            return active.out.number, Activate(each.out, active.x, other, active.kind)
    return None


def operands_of(each: Operation) -> list[Operand]:
    """Return the operands of an operation."""
    found = []
    for name in (field.name for field in fields(each)):
        value = getattr(each, name)
        parts = value if isinstance(value, tuple) else (value,)
        found += [part for part in parts if isinstance(part, Operand)]
    return found


def _moved(each: Any, merged: Mapping[int, tuple[Value, int]]) -> Any:
    """Return an operation that reads columns of merged values in the place of their parts."""

    def moved(thing: Any) -> Any:
        if isinstance(thing, tuple):
            return tuple(map(moved, thing))
        return _moved_operand(thing, merged) if isinstance(thing, Operand) else thing

    return type(each)(*(moved(getattr(each, field.name)) for field in fields(each)))


def _moved_operand(operand: Operand, merged: Mapping[int, tuple[Value, int]]) -> Operand:
    values_C, columns_C = operand.values_C.copy(), operand.columns_C.copy()
    for number in np.unique(operand.values_C):
        if number in merged:
            out, first = merged[number]
            is_part = operand.values_C == number
            values_C[is_part] = out.number
            columns_C[is_part] += first
    return Operand(values_C, columns_C)
