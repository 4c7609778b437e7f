"""A model's forward as operations on rows, without names or memory.

Products, norms and mixtures are those of the device for which the model was traced.

Shapes: R = rows, C = columns of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import AttentionCall, CpuStateCall


class UntraceableError(Exception):
    """An operation of a model's forward that has no kernel; its text names the operation."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """An array of rows, [R, C]: the embedding, or the result of an operation."""

    num_columns: int
    number: int


@dataclass(frozen=True, slots=True)
class Operand:
    """Columns of values, in the order in which an operation reads them."""

    values_C: NDArray[np.int64]  # numbers of values
    columns_C: NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Linears:
    """Linears that read one operand; a device lays out their weights as one product."""

    modules: tuple[Any, ...]
    product: Any = None  # the device's, once the weights are laid out

    @property
    def in_features(self) -> int:
        return int(self.modules[0].in_features)

    @property
    def out_features(self) -> int:
        return sum(each.out_features for each in self.modules)


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times the weights of linears."""

    out: Value
    x: Operand
    linears: Any  # Linears


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of every so many columns as its scale has."""

    out: Value
    x: Operand
    norm: Any


@dataclass(frozen=True, slots=True)
class Combine:
    """A sum, difference or product of rows, or of rows and a constant row."""

    out: Value
    name: str
    x: Operand
    other: Operand | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Activate:
    """An activation of x, times `up` if there is one (activations.py)."""

    out: Value
    x: Operand
    up: Operand | None
    kind: int


@dataclass(frozen=True, slots=True)
class Attend:
    """A layer's write of keys and values, and its read of the cache."""

    out: Value
    layer: int
    query: Operand
    key: Operand
    value: Operand
    num_heads: int
    call: AttentionCall


@dataclass(frozen=True, slots=True)
class Route:
    """A router's logits, which are float32."""

    out: Value
    x: Operand
    mixture: Any


@dataclass(frozen=True, slots=True)
class Enter:
    """The first product of the experts that each row chose, and their gate, in float32."""

    out: Value
    x: Operand
    logits: Operand
    mixture: Any


@dataclass(frozen=True, slots=True)
class Leave:
    """The second product of the experts, and the sum of each row's."""

    out: Value
    between: Operand
    logits: Operand
    x: Operand  # of the whole mixture, for steps of many rows
    mixture: Any


@dataclass(frozen=True, slots=True)
class Advance:
    """A layer's advance of states."""

    out: Value
    layer: int
    inputs: tuple[Operand, ...]
    call: CpuStateCall


@dataclass(frozen=True, slots=True)
class Call:
    """A module that computes each row by itself, and is called as a whole."""

    out: Value
    x: Operand
    module: Any


Operation = Product | Norm | Combine | Activate | Attend | Route | Enter | Leave | Advance | Call


@dataclass(frozen=True, slots=True)
class TailCall:
    """A call of torch after the head; `places` has the results that it takes, by argument."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    places: tuple[int | None, ...]  # 0: the head's output, i: that of call i - 1; None: a constant


@dataclass(slots=True)
class Trace:
    """A model's forward as operations on rows."""

    embedding: Value
    operations: list[Operation] = field(default_factory=list)
    head: Product | None = None
    tail: list[TailCall] = field(default_factory=list)
