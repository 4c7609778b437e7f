"""The operations of a model for a GPU, found by a run of it on a few tokens.

The model's own modules run. Embeddings, linears, norms, activations and attention note themselves.
A module with functions of torch that are no operation is called as a whole, such as a mixture of
experts. It must compute each row by itself, which the self-check shows.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import LayerPlan, StateCall
from ropewalk.model_runtime.gpu.gate import Activation, activation_of
from ropewalk.model_runtime.gpu.rms_norm import Scale, candidates
from ropewalk.model_runtime.layers.joined_linears import are_alike
from ropewalk.model_runtime.layers.low_bits.stored import StoredLinear
from ropewalk.model_runtime.layers.match_norm import equivalent_norm
from ropewalk.model_runtime.tracing.operations import Call, Linears, Trace, UntraceableError
from ropewalk.model_runtime.tracing.passes import join_gates, merge_products
from ropewalk.model_runtime.tracing.recorder import Recorder, attribute

_MOST_ATTEMPTS = 12


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


@dataclass(frozen=True, slots=True)
class _Known:
    """What trials have shown about modules."""

    scales: dict[nn.Module, Scale]  # of norms
    activations: dict[nn.Module, Activation]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Try all modules of a model."""
        scales, activations = {}, {}
        for module in model.modules():
            norm, activation = equivalent_norm(module, candidates), activation_of(module)
            if norm is not None:
                scales[module] = norm.scale
            if activation is not None:
                activations[module] = activation
        return cls(scales, activations)


@torch.inference_mode()
def traced(model: Any, plans: Mapping[int, LayerPlan]) -> Trace:
    """Return the operations of a patched model, joined by passes. Raises UntraceableError."""
    known = _Known.of(model)
    whole: set[type[nn.Module]] = set()  # classes whose modules are called as a whole
    refused: set[type[nn.Module]] = set()
    for _ in range(_MOST_ATTEMPTS):
        recorder = GpuRecorder(plans)
        try:
            trace = _attempt(model, recorder, known, whole)
        except UntraceableError as error:
            reason = error
            # The calls that have not returned, the innermost first.
            called = reversed(recorder.called)
            open_ = [type(each) for each in called if _can_be_whole(each, known)]
            refused |= whole & set(open_)
            whole -= refused
            kind = next((each for each in open_ if each not in refused), None)
            if kind is None:
                raise
            whole.add(kind)
        else:
            merge_products(trace, are_alike)
            join_gates(trace)
            return trace
    raise reason


def _can_be_whole(module: nn.Module, known: _Known) -> bool:
    """Return whether a module may be called as a whole: it has no attention in it."""
    has_attention = any(hasattr(each, "layer_idx") for each in module.modules())
    return not (has_attention or isinstance(module, nn.ModuleList) or module in known.scales)


def _attempt(
    model: Any, recorder: GpuRecorder, known: _Known, kinds: set[type[nn.Module]]
) -> Trace:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not _is_linear(head):
        raise UntraceableError("has no head")
    with ExitStack() as stack:
        inside: set[nn.Module] = set()  # of what is called as a whole
        for module in model.modules():
            if module in inside:
                continue
            if type(module) in kinds:
                inside |= set(module.modules())
                forward: Callable[..., Any] = partial(recorder.call, module, module.forward)
            elif module is embedding:
                forward = partial(recorder.embed, module)
            elif module is head:
                forward = partial(recorder.end, Linears((module,)))
            else:
                forward = _noting(recorder, module, known)
            stack.enter_context(attribute(module, "forward", _watched(recorder, module, forward)))
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


def _noting(recorder: GpuRecorder, module: nn.Module, known: _Known) -> Callable[..., Any]:
    """Return the forward of a module that notes itself; its own forward for another module."""
    scale, activation = known.scales.get(module), known.activations.get(module)
    if scale is not None:
        return partial(recorder.normalize, scale, len(scale.weight_D))
    if activation is not None:
        return partial(recorder.activate, int(activation))
    if _is_linear(module):
        return partial(recorder.multiply, Linears((module,)))
    return module.forward


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear or isinstance(module, StoredLinear)
