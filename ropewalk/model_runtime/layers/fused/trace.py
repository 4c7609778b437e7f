"""The operations of a model's own forward, found by a run of it on a few tokens.

Every architecture orders norms, products and sums in its own way. Here a model's forward runs once,
and what it computes is noted (recorder.py). Embeddings, linears, norms, activations, mixtures and
attention note themselves. Between them, torch's sums and products of tensors are noted.

A trace proves nothing about numbers: install_forward.py compares the bits of both forwards.

Nothing is computed: modules return zeros. So weights are not read, and a trace of a model of any
size takes milliseconds.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import (
    CpuStateCall,
    LayerPlan,
    StateCall,
)
from ropewalk.model_runtime.layers.experts.mixture import Mixture
from ropewalk.model_runtime.layers.fused.mixtures import stage_widths
from ropewalk.model_runtime.layers.packed_linear import (
    PackedLinear,
    RowwiseActivation,
    is_packable,
)
from ropewalk.model_runtime.layers.rms_norm import RmsNorm
from ropewalk.model_runtime.layers.states.rowwise_functions import CALLED_BY_NAME
from ropewalk.model_runtime.tracing.operations import (
    Advance,
    Enter,
    Leave,
    Linears,
    Route,
    Trace,
    UntraceableError,
)
from ropewalk.model_runtime.tracing.recorder import NUM_TOKENS, Recorder, attribute, part_of


class CpuRecorder(Recorder):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes the operations of a model that is packed for a CPU."""

    in_cache_order: ClassVar[bool] = True

    def mix(self, mixture: Mixture, x: Tensor) -> Any:
        """Note the three operations of a mixture of experts."""
        operand, axis = self.operand(x)
        widths = stage_widths(mixture, x.itemsize)
        logits, between = (self.value(width) for width in widths)
        out, value = self.output(x, (*x.shape[:-1], mixture.experts.num_outputs), axis)
        held, entered = part_of(logits, None), part_of(between, None)
        self.operations.extend(
            [
                Route(logits, operand, mixture),
                Enter(between, operand, held, mixture),
                Leave(value, entered, held, operand, mixture),
            ]
        )
        if not mixture.is_pair:
            return out
        weights = torch.zeros(NUM_TOKENS, mixture.num_choices)
        self.note_input(weights)  # no operation may read it
        return out, weights

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Note a layer's advance of states; return zeros."""
        on_cpu = cast("CpuStateCall", call)
        inputs = tuple(self.operand(each)[0] for each in on_cpu.inputs)
        out, value = self.output(on_cpu.inputs[0], call.zeros().shape)
        self.operations.append(Advance(value, layer_idx, inputs, on_cpu))
        return out  # type: ignore[no-any-return]


@torch.inference_mode()
def traced(model: Any, plans: Mapping[int, LayerPlan]) -> Trace:
    """Return the operations of a model's own forward. Raises UntraceableError."""
    recorder = CpuRecorder(plans)
    head = model.get_output_embeddings()
    if not _is_linear(head):
        raise UntraceableError("has no head")
    with ExitStack() as stack:
        for module in model.modules():
            forward = _noting(recorder, module, head, model.get_input_embeddings())
            if forward is not None:
                stack.enter_context(attribute(module, "forward", forward))
        for each in CALLED_BY_NAME:
            if each.kind is not None:
                activate = partial(recorder.activate, each.kind)
                stack.enter_context(attribute(each, "forward", activate))
        return recorder.of(model)


def _noting(
    recorder: CpuRecorder, module: Any, head: Any, embedding: nn.Module
) -> Callable[..., Any] | None:
    """Return the forward of a module of ours that notes itself; None for another module."""
    note: Callable[..., Any] | None = None
    mixture = vars(module).get("forward")
    if module is embedding:
        note = partial(recorder.embed, module)
    elif module is head:
        note = partial(recorder.end, Linears((head,)))
    elif _is_linear(module):
        note = partial(recorder.multiply, Linears((module,)))
    elif isinstance(mixture, Mixture):
        note = partial(recorder.mix, mixture)
    elif isinstance(module, RmsNorm):
        note = partial(recorder.normalize, module, len(module.scale_D))
    elif isinstance(module, RowwiseActivation) and module.kind is not None:
        note = partial(recorder.activate, module.kind)
    return note


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear, whether or not its weight is laid out."""
    return isinstance(module, PackedLinear) or is_packable(module)
