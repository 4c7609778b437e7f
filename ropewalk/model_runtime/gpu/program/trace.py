"""The operations of a model for a GPU, found by a run of it on a few tokens.

Embeddings, products, norms, gated blocks and attention note themselves. A module with functions of
torch that are no operation is called as a whole, such as a mixture of experts. It must compute each
row by itself, which the self-check shows.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import LayerPlan, StateCall
from ropewalk.model_runtime.gpu.gated_block import GatedBlock
from ropewalk.model_runtime.gpu.rms_norm import GpuRmsNorm
from ropewalk.model_runtime.layers.merged_linear import MergedPart
from ropewalk.model_runtime.tracing.operations import Call, Trace, UntraceableError
from ropewalk.model_runtime.tracing.recorder import Recorder, attribute

_MOST_ATTEMPTS = 12


@dataclass(frozen=True, slots=True)
class GpuProduct:
    """Rows times a weight, which is a view that torch multiplies by without another one."""

    weight_KN: Tensor
    bias_N: Tensor | None

    @classmethod
    def of(cls, weight_NK: Tensor, bias_N: Tensor | None) -> Self:
        """Return the product of a linear's weight and bias."""
        return cls(weight_NK.detach().t(), None if bias_N is None else bias_N.detach())

    @property
    def in_features(self) -> int:
        return self.weight_KN.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight_KN.shape[1]


class GpuRecorder(Recorder):
    """Notes the operations of a model on a GPU."""

    def __init__(self, plans: Mapping[int, LayerPlan]) -> None:
        super().__init__(plans)
        self.called: list[nn.Module] = []  # the modules that have begun and not ended

    def call(self, module: nn.Module, forward: Callable[..., Any], x: Any, *others: Any) -> Any:
        """Note a module that is called as a whole; `forward` is its own."""
        if others or not isinstance(x, Tensor):
            raise UntraceableError(f"calls {type(module).__name__} with other arguments than rows")
        expected = forward(torch.zeros_like(x))
        if not isinstance(expected, Tensor) or expected.shape[:-1] != x.shape[:-1]:
            raise UntraceableError(f"has a {type(module).__name__} with another result than rows")
        return self.note(lambda out, operand: Call(out, operand, module), x, expected.shape[-1])

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Raise UntraceableError: layers with states are not launched from a list."""
        del call
        raise UntraceableError(f"has states in layer {layer_idx}")


@torch.inference_mode()
def traced(model: Any, plans: Mapping[int, LayerPlan]) -> Trace:
    """Return the operations of a model with fewer kernels. Raises UntraceableError."""
    whole: set[type[nn.Module]] = set()  # classes whose modules are called as a whole
    refused: set[type[nn.Module]] = set()
    for _ in range(_MOST_ATTEMPTS):
        recorder = GpuRecorder(plans)
        try:
            return _attempt(model, recorder, whole)
        except UntraceableError as error:
            reason = error
            # The calls that have not returned, the innermost first.
            open_ = [type(each) for each in reversed(recorder.called) if _can_be_whole(each)]
            refused |= whole & set(open_)
            whole -= refused
            kind = next((each for each in open_ if each not in refused), None)
            if kind is None:
                raise
            whole.add(kind)
    raise reason


def _can_be_whole(module: nn.Module) -> bool:
    """Return whether a module may be called as a whole: it has no attention in it."""
    return not any(hasattr(each, "layer_idx") for each in module.modules()) and not isinstance(
        module, GpuRmsNorm | GatedBlock | nn.ModuleList
    )


def _attempt(model: Any, recorder: GpuRecorder, kinds: set[type[nn.Module]]) -> Trace:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear:
        raise UntraceableError("has no head")
    with ExitStack() as stack:
        inside: set[nn.Module] = set()  # of what is called as a whole
        for module in model.modules():
            if module in inside:
                continue
            if type(module) in kinds:
                inside |= set(module.modules())
                forward: Callable[..., Any] = partial(recorder.call, module, module.forward)
            else:
                forward = _noting(recorder, module, head, embedding)
            if isinstance(module, GatedBlock):
                inside |= set(module.modules())
            stack.enter_context(attribute(module, "forward", _watched(recorder, module, forward)))
        shared = [each.shared for each in model.modules() if isinstance(each, MergedPart)]
        for each in {id(each): each for each in shared}.values():
            each.forget()
            joined: Any = each.product
            product = partial(recorder.multiply, GpuProduct.of(*joined.parts))
            stack.enter_context(attribute(each, "product", product))
        return recorder.of(model)


def _watched(
    recorder: GpuRecorder, module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        recorder.called.append(module)
        result = forward(*arguments, **named)
        recorder.called.pop()
        return result

    return run


def _noting(
    recorder: GpuRecorder, module: Any, head: nn.Linear, embedding: nn.Module
) -> Callable[..., Any]:
    """Return the forward of a module that notes itself; its own forward for another module."""
    if module is embedding:
        return partial(recorder.embed, module)
    if module is head:
        return partial(recorder.end, GpuProduct.of(head.weight, head.bias))
    if isinstance(module, GpuRmsNorm):
        return partial(recorder.normalize, module.scale, len(module.scale.weight_D))
    own: Any = module
    if type(module) is nn.Linear:
        return partial(recorder.multiply, GpuProduct.of(own.weight, own.bias))
    if isinstance(module, GatedBlock):
        down: Any = module.down_proj
        gate_up = GpuProduct.of(*module.joined_parts)
        product = GpuProduct.of(down.weight, down.bias)
        return partial(recorder.gated, gate_up, int(module.activation), product)
    return module.forward  # type: ignore[no-any-return]
