"""A model's list of launches whose rows have the same bits in any batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu.exact.mixtures import is_exact, take_over
from ropewalk.model_runtime.gpu.exact.product import (
    Weight,
    find_fault,
    leave_out_least,
    multiply_into,
    product_of,
)
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward
from ropewalk.model_runtime.gpu.program.trace import traced
from ropewalk.model_runtime.layers.joined_linears import joined_weight, merged_bias
from ropewalk.model_runtime.layers.low_bits.stored import StoredLinear
from ropewalk.model_runtime.tracing.operations import Call, Linears, Trace, UntraceableError


@torch.inference_mode()
def exact_forward(model: Any, plans: Mapping[int, LayerPlan]) -> FlatForward:
    """Return this forward for a model, and take its mixtures and stored linears over, in place.

    Raises ModelError if a part of the model, or the device, gives a row other bits in other
    batches.
    """
    mixtures = take_over(model)
    for module in model.modules():
        if isinstance(module, StoredLinear):  # in a mixture it is called as a module
            module.multiply = partial(_product_of_rows, _weight_of(module))
    products: list[tuple[Sequence[Weight], Tensor | None]] = []

    def multiply(linears: Linears) -> Callable[..., None]:
        weights, bias_N = _weights_of(linears.modules)
        products.append((weights, bias_N))
        return partial(multiply_into, weights=weights, bias_N=bias_N)

    try:
        trace = traced(model, plans)
        _check_calls(trace)
        forward = FlatForward(model, trace, plans, multiply)
    except UntraceableError as error:
        raise ModelError(
            f"exact_batches is not served on a GPU for {type(model).__name__}, because it {error}"
        ) from error

    def fault_of_forms() -> str | None:
        like = next(model.parameters())
        faults = (find_fault(products, like), *(each.find_fault(like) for each in mixtures))
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


def _weights_of(linears: Sequence[Any]) -> tuple[Sequence[Weight], Tensor | None]:
    """Return the weights of linears and their bias: codes that stay so, or all weights as one."""
    if all(type(each) is nn.Linear for each in linears):
        weight_NK, bias_N = joined_weight(linears)
        return (weight_NK,), bias_N
    return tuple(map(_weight_of, linears)), merged_bias(linears)


def _weight_of(linear: Any) -> Weight:
    if isinstance(linear, StoredLinear):
        assert linear.codes is not None, "a library has taken them"
        return linear.codes
    weight: Tensor = linear.weight.detach()
    return weight


def _product_of_rows(weight: Weight, x: Tensor, bias_N: Tensor | None) -> Tensor:
    return product_of(x, weight, bias_N)


def _check_calls(trace: Trace) -> None:
    """Raise UntraceableError if a module is called whose sums torch orders."""
    for each in trace.operations:
        if isinstance(each, Call) and not is_exact(each.module):
            raise UntraceableError(f"has a {type(each.module).__name__} of torch's functions")
