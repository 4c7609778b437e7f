"""The operations of a model's own forward, found by a run of it on a few tokens.

Every architecture orders norms, products and sums in its own way. Here a model's forward runs once,
and what it computes is noted (recorder.py). Our own modules note themselves: embeddings, products,
norms, gates, activations and attention. Between them, torch's sums and products of tensors are
noted.

A trace proves nothing about numbers: self_check.py compares the bits of both forwards.

Nothing is computed: modules return zeros. So weights are not read, and a trace of a model of any
size takes milliseconds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import STEP, LayerPlan
from ropewalk.model_runtime.layers.experts.mixture import Mixture
from ropewalk.model_runtime.layers.fused.operations import Trace, UntraceableError
from ropewalk.model_runtime.layers.fused.recorder import NUM_TOKENS, Recorder
from ropewalk.model_runtime.layers.gated_mlp import GatedMlp
from ropewalk.model_runtime.layers.merged_linear import MergedPart, SharedInput
from ropewalk.model_runtime.layers.packed_linear import PackedLinear, RowwiseActivation
from ropewalk.model_runtime.layers.rms_norm import RmsNorm
from ropewalk.model_runtime.layers.states.rowwise_functions import Namespace


@torch.inference_mode()
def traced(model: Any, plans: Mapping[int, LayerPlan]) -> Trace:
    """Return the operations of a packed model's own forward. Raises UntraceableError."""
    recorder = Recorder(plans)
    head = model.get_output_embeddings()
    if not isinstance(head, PackedLinear):
        raise UntraceableError("has no head")
    input_ids = torch.arange(NUM_TOKENS)[None] + 1
    positions = torch.arange(NUM_TOKENS)[None]
    recorder.note_input(positions)
    recorder.note_input(input_ids)
    with ExitStack() as stack:
        for module in model.modules():
            forward = _noting(recorder, module, head, model.get_input_embeddings())
            if forward is not None:
                stack.enter_context(_attribute(module, "forward", forward))
        for each in _called_by_name(model):
            activate = partial(_ACTIVATE, recorder, each.kind)
            stack.enter_context(_attribute(each, "forward", activate))
        for shared in {id(each): each for each in _shared_inputs(model)}.values():
            product: Any = shared.product
            noted = partial(recorder.multiply, product)
            stack.enter_context(_attribute(shared, "product", noted))
        stack.enter_context(recorder)
        try:
            logits = model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=0,
                **{STEP: recorder},
            ).logits
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}") from error
    if recorder.trace is None or not recorder.is_result(logits):
        raise UntraceableError("does not end with its head")
    return recorder.trace


def _noting(
    recorder: Recorder, module: Any, head: Any, embedding: nn.Module
) -> Callable[..., Any] | None:
    """Return the forward of a module of ours that notes itself; None for another module."""
    if module is embedding:
        return partial(recorder.embed, module)
    if module is head:
        return partial(recorder.end, head.product)
    mixture = vars(module).get("forward")
    if isinstance(mixture, Mixture):
        return partial(recorder.mix, mixture)
    for kind, name, note in _OURS:
        own = module if name is None else getattr(module, name, None)
        if isinstance(module, kind) and own is not None:
            return partial(note, recorder, own)
    return None


_ACTIVATE: Callable[..., Tensor] = Recorder.activate
# Modules that note themselves, with the attribute that the recorder needs of each.
_OURS: tuple[tuple[type[nn.Module], str | None, Callable[..., Tensor]], ...] = (
    (PackedLinear, "product", Recorder.multiply),
    (GatedMlp, None, Recorder.gated),
    (RmsNorm, None, Recorder.normalize),
    (RowwiseActivation, "kind", _ACTIVATE),
)


def _called_by_name(model: nn.Module) -> list[RowwiseActivation]:
    """Return activations that forwards call as functions of torch (rowwise_functions.py)."""
    found: dict[int, RowwiseActivation] = {}
    for module in model.modules():
        forward = vars(module).get("forward")
        if not isinstance(forward, MethodType):
            continue
        for name in ("torch", "F"):
            functions = forward.__func__.__globals__.get(name)
            if not isinstance(functions, Namespace):
                continue
            for each in vars(functions).values():
                if isinstance(each, RowwiseActivation) and each.kind is not None:
                    found[id(each)] = each
    return list(found.values())


def _shared_inputs(model: nn.Module) -> Iterator[SharedInput]:
    for module in model.modules():
        if isinstance(module, MergedPart):
            module.forget()
            yield module.shared


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own within the block."""
    had, before = name in vars(owner), vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)
