"""A model's list of launches whose rows have the same bits in any batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu.exact.mixtures import is_exact, take_over
from ropewalk.model_runtime.gpu.exact.product import find_fault, leave_out_least, multiply_into
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward
from ropewalk.model_runtime.gpu.program.trace import traced
from ropewalk.model_runtime.layers.joined_linears import joined_weight
from ropewalk.model_runtime.tracing.operations import Call, Linears, Trace, UntraceableError


@torch.inference_mode()
def exact_forward(model: Any, plans: Mapping[int, LayerPlan]) -> FlatForward:
    """Return this forward for a model, and take its mixtures over, in place.

    Raises ModelError if a part of the model, or the device, gives a row other bits in other
    batches.
    """
    mixtures = take_over(model)
    weights: list[tuple[Tensor, Tensor | None]] = []

    def multiply(linears: Linears) -> Callable[..., None]:
        if not all(type(each) is nn.Linear for each in linears.modules):
            raise UntraceableError("has quantised weights (weights: dequantised serves them)")
        weights.append(joined_weight(linears.modules))
        weight_NK, bias_N = weights[-1]
        return partial(multiply_into, weight_NK=weight_NK, bias_N=bias_N)

    try:
        trace = traced(model, plans)
        _check_calls(trace)
        forward = FlatForward(model, trace, plans, multiply)
    except UntraceableError as error:
        raise ModelError(
            f"exact_batches is not served on a GPU for {type(model).__name__}, because it {error}"
        ) from error

    def fault_of_forms() -> str | None:
        faults = (find_fault(weights), *(each.find_fault() for each in mixtures))
        return next((each for each in faults if each is not None), None)

    fault = fault_of_forms()
    if fault is not None:
        leave_out_least()
        fault = fault_of_forms()
    if fault is not None:
        raise ModelError(
            f"exact_batches is not served on this GPU: {fault} has other bits in a larger batch"
        )
    return forward


def _check_calls(trace: Trace) -> None:
    """Raise UntraceableError if a module is called whose sums torch orders."""
    for each in trace.operations:
        if isinstance(each, Call) and not is_exact(each.module):
            raise UntraceableError(f"has a {type(each.module).__name__} of torch's functions")
