"""Passes over the operations of a trace join what they should, and nothing else."""

from typing import Any

import numpy as np
from torch import nn

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
from ropewalk.model_runtime.tracing.passes import join_gates, merge_products

WIDTH = 4


def whole(number: int, first: int = 0, width: int = WIDTH) -> Operand:
    """Columns of one value."""
    return Operand(np.full(width, number), np.arange(first, first + width))


def traced(*operations: Operation) -> Trace:
    """A trace of these operations, whose embedding is value 0."""
    return Trace(Value(WIDTH, 0), list(operations))


def product(number: int, reads: int, linear: Any = None) -> Product:
    """A product of a value and a linear of its own, or of one that is given."""
    linears = Linears((linear or nn.Linear(WIDTH, WIDTH),))
    return Product(Value(WIDTH, number), whole(reads), linears)


def test_products_of_one_operand_become_one_and_their_readers_follow() -> None:
    """Three of one input are merged; a fourth, after a product of another input, is not."""
    made = traced(
        *(product(number, 0) for number in (1, 2, 3)),
        Combine(Value(WIDTH, 4), "add", whole(2), whole(3)),
        product(5, 4),
        product(6, 0),
    )
    merge_products(made, lambda linears: True)
    joined, added, *others = made.operations
    assert isinstance(joined, Product)
    assert isinstance(added, Combine)
    assert (joined.out.num_columns, len(joined.linears.modules)) == (3 * WIDTH, 3)
    assert added.x.values_C.tolist() == [1] * WIDTH
    assert added.x.columns_C.tolist() == list(range(WIDTH, 2 * WIDTH))
    assert isinstance(added.other, Operand)
    assert added.other.columns_C.tolist() == list(range(2 * WIDTH, 3 * WIDTH))
    assert [each.out.number for each in others] == [5, 6]


def test_a_linear_that_is_called_twice_and_linears_of_two_kinds_stay_alone() -> None:
    """A weight is laid out once."""
    twice = nn.Linear(WIDTH, WIDTH)
    made = traced(product(1, 0, twice), product(2, 0, twice))
    merge_products(made, lambda linears: True)
    assert len(made.operations) == 2
    made = traced(product(1, 0), product(2, 0))
    merge_products(made, lambda linears: False)
    assert len(made.operations) == 2


def test_an_activation_and_its_product_are_one_only_if_nothing_else_reads_it() -> None:
    """Either operand may be the activation; a part of it is no gate."""
    active = Activate(Value(WIDTH, 1), whole(0), None, 0)
    gate = Combine(Value(WIDTH, 2), "multiply", whole(0), whole(1))
    made = traced(active, gate)
    join_gates(made)
    (joined,) = made.operations
    assert isinstance(joined, Activate)
    assert joined.out.number == 2
    assert joined.up is not None
    for other in (
        Combine(Value(WIDTH, 3), "add", whole(1), whole(2)),  # a second reader
        Combine(Value(WIDTH, 3), "multiply", whole(2), whole(1)),
    ):
        made = traced(active, gate, other)
        join_gates(made)
        assert len(made.operations) == 3
    part = Combine(Value(2, 2), "multiply", whole(0, 0, 2), whole(1, 0, 2))
    made = traced(active, part)
    join_gates(made)
    assert len(made.operations) == 2
