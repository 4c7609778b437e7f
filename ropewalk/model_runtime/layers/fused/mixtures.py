"""A mixture of experts as three operations of a program, and the fields that the kernel reads.

Logits and what lies between an expert's products are float32. Their columns are counted in the
number type of rows, as those of all slots are.
"""

from collections.abc import Iterable
from typing import Any

from ropewalk.model_runtime.cpu_kernels import fused_decode as kernel
from ropewalk.model_runtime.cpu_kernels.experts.stages import matrix_fields
from ropewalk.model_runtime.layers.experts.mixture import Mixture
from ropewalk.model_runtime.tracing.operations import (
    Enter,
    Leave,
    Operation,
    Route,
    UntraceableError,
)

Fields = dict[int, int]
Factors = tuple[float, float]


def stage_widths(mixture: Mixture, itemsize: int) -> tuple[int, int]:
    """Return the columns of the logits, and of what lies between the products.

    `itemsize`: bytes of a row's number. Raises UntraceableError if panels have other numbers.
    """
    packed = [each.packed_Q for each in mixture.experts.panels]
    if any(each.size and each.itemsize != itemsize for each in packed):
        raise UntraceableError("has experts of another number type than its rows")
    scale = 4 // itemsize
    between = mixture.num_choices * mixture.experts.num_between
    return scale * mixture.num_experts, scale * between


def stage_fields(each: Route | Enter | Leave) -> tuple[tuple[Any, ...], Fields, Factors]:
    """Return what to keep, the fields and the factors of an operation of a mixture."""
    mixture = each.mixture
    if isinstance(each, Route):
        router = mixture.router
        fields = {
            kernel.ADDRESS: router.packed_Q.ctypes.data,
            kernel.LENGTH: router.packed_Q.size,
            kernel.OTHER_ADDRESS: router.bias_N.ctypes.data,
            kernel.OTHER_LENGTH: router.bias_N.size,
            kernel.LAYOUT: router.layout,
            kernel.CHAIN: router.chain,
            kernel.DIM: mixture.num_experts,
        }
        return (router,), fields, (0.0, 0.0)
    experts, gate = mixture.experts, mixture.gate
    gate_up, down = experts.panels
    matrix = gate_up if isinstance(each, Enter) else down
    matrix_F = matrix_fields(
        matrix, mixture.num_choices, gate, is_normalised=mixture.is_normalised,
        is_rounded=mixture.is_rounded,
    )  # fmt: skip
    fields = {
        kernel.ADDRESS: matrix_F.ctypes.data,
        kernel.LENGTH: len(matrix_F),
        kernel.DIM: experts.num_between,
    }
    return (matrix_F, matrix), fields, (gate.alpha, gate.limit)


def experts_product(operations: Iterable[Operation | None]) -> Any:
    """Return the one product of all experts; None without any. Raises UntraceableError."""
    panels = [
        matrix
        for each in operations
        if isinstance(each, Leave)
        for matrix in each.mixture.experts.panels
    ]
    products = {each.product for each in panels}
    if len(products) > 1:
        raise UntraceableError("has experts of floats and quantised ones")
    return next(iter(products), None)


def active_bytes(mixture: Mixture) -> int:
    """Return how many bytes of weights one row reads."""
    experts = sum(each.num_panels * each.panel_bytes for each in mixture.experts.panels)
    return mixture.router.num_bytes + mixture.num_choices * experts
