"""Decoder layers on a GPU whose residual additions are one kernel with the norm that follows.

A layer adds the attention's output to its input and normalises the sum for its feed-forward block.
Then it adds the block's output, and the next layer or the last norm normalises that sum. Either
addition and its norm are one kernel here, also if the outputs have norms of their own (Gemma 2).

Layers are recognised by the names of their children. A name proves nothing, so each layer is called
with the arguments and the input that the model gave it, and compared with the model's own output.
Attention is the value of each token itself in this trial, so that its part of the output is seen.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import AttentionCall, StateCall
from ropewalk.model_runtime.gpu.gated_block import fuse_gates
from ropewalk.model_runtime.gpu.rms_norm import GpuRmsNorm, candidates
from ropewalk.model_runtime.layers.match_norm import replace_norms
from ropewalk.model_runtime.layers.merged_linear import join
from ropewalk.model_runtime.layers.replace_modules import Replacement
from ropewalk.model_runtime.probing.probe import run_probe
from ropewalk.model_runtime.probing.random_numbers import random_numbers

# Names of the norms before and after the attention, and before and after the block.
_FORMS: tuple[tuple[str, str | None, str, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)
_BLOCKS = {"self_attn", "mlp"}
# Shares of the change that a layer makes to its input, and of its output, which is rounded. In
# float16, layers of random numbers were within 1.2e-3 of the change in float64.
_ROUNDING = {
    torch.float32: (1e-5, 1e-6), torch.float16: (4e-3, 2**-11), torch.bfloat16: (2e-2, 2**-8),
}  # fmt: skip


class ResidualLayer(Replacement):
    """One decoder layer. Its children keep their names; other attributes are the original's."""

    def __init__(self, original: nn.Module, form: tuple[str, str | None, str, str | None]) -> None:
        super().__init__(original)
        for name, child in original.named_children():
            setattr(self, name, child)  # add_module refuses names that the original has
        self._form = form
        # The norm that reads this output, if known. In a tuple, so that it is no child of this.
        self._following: tuple[GpuRmsNorm, ...] = ()

    def link(self, following: GpuRmsNorm | None) -> None:
        """Set the norm that is called with this layer's output."""
        self._following = () if following is None else (following,)

    @property
    def first_norm(self) -> GpuRmsNorm:
        norm: GpuRmsNorm = self.get_submodule(self._form[0])  # type: ignore[assignment]
        return norm

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """Return the layer's output, same shape; `arguments` go to the attention."""
        parts: Any = self._modules
        norms: list[Any] = [None if name is None else parts[name] for name in self._form]
        before_attention, after_attention, before_block, after_block = norms
        normed = before_attention(hidden_states)
        attended, *_ = parts["self_attn"](hidden_states=normed, **arguments)
        hidden_states = before_block.keep_sum(hidden_states, attended, _scale(after_attention))
        answer = parts["mlp"](before_block(hidden_states))
        for norm in self._following:
            return norm.keep_sum(hidden_states, answer, _scale(after_block))
        added: Tensor = answer if after_block is None else after_block(answer)
        return hidden_states + added


def _scale(norm: nn.Module | None) -> Any:
    assert norm is None or isinstance(norm, GpuRmsNorm)
    return None if norm is None else norm.scale


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a decoder layer in a trial."""

    hidden_states: Tensor
    arguments: dict[str, Any]
    output: Any


class _OwnValue:
    """A step whose attention gives every token its own value, and whose states give zeros."""

    def advance(self, layer_idx: int, call: StateCall) -> Tensor:
        """Return zeros."""
        del layer_idx
        return call.zeros()

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the values, one for each query head, [1, T, H, V]."""
        del layer_idx
        num_groups = call.query_1HTD.shape[1] // call.value_1KTV.shape[1]
        return call.value_1KTV.repeat_interleave(num_groups, dim=1).transpose(1, 2).contiguous()


@torch.inference_mode()
def fuse_residuals(model: nn.Module) -> None:
    """Replace every decoder layer that computes the same, in place, and link their norms.

    Layers are compared with random numbers, because a layer of zeros would equal any other.
    """
    with random_numbers(model):
        _fuse_residuals(model)


def _fuse_residuals(model: nn.Module) -> None:
    decoder = next(filter(_has_layers, model.modules()), None)
    if decoder is None:
        return
    layers: Any = decoder.layers
    calls = _recorded(model, layers)
    fused = [_fused(layer, calls.get(index)) for index, layer in enumerate(layers)]
    for index, layer in enumerate(fused):
        if layer is not None:
            layers[index] = layer
    norms = [None if layer is None else layer.first_norm for layer in fused]
    last = getattr(decoder, "norm", None)
    following = [*norms[1:], last if isinstance(last, GpuRmsNorm) else None]
    linked = [
        (layer, norm)
        for layer, norm in zip(fused, following, strict=True)
        if layer is not None and norm is not None
    ]
    for layer, norm in linked:
        layer.link(norm)
    # A norm that is not called with the sum of the layer before it would compute for nothing.
    run_probe(model, _OwnValue())
    for layer, norm in linked:
        norm.forget()
        if not norm.has_used_kept:
            layer.link(None)


def _has_layers(module: nn.Module) -> bool:
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and any(map(_form, layers))


def _recorded(model: nn.Module, layers: Sequence[nn.Module]) -> dict[int, _Call]:
    """Return the calls of the layers in a short prompt, by their place, if each has one input."""
    calls: dict[int, _Call] = {}

    def watch(index: int) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if len(args) == 1:
                calls[index] = _Call(args[0], kwargs, out)

        return note

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            hook = layer.register_forward_hook(watch(index), with_kwargs=True)
            stack.callback(hook.remove)
        run_probe(model, _OwnValue())
    return calls


def _fused(layer: nn.Module, call: _Call | None) -> ResidualLayer | None:
    """Return the same layer with fewer kernels, or None if it is something else."""
    form = _form(layer)
    if call is None or form is None or not isinstance(call.output, Tensor):
        return None
    fused = ResidualLayer(layer, form).eval()
    try:
        output = fused(call.hidden_states, **call.arguments)
    except Exception:  # noqa: BLE001  # parts of a checkpoint that take other arguments
        return None
    rounding = _ROUNDING.get(output.dtype)
    if rounding is None:  # such as float64, whose error here is not known
        return None
    of_change, of_output = rounding
    given, got, expected = (each.float() for each in (call.hidden_states, output, call.output))
    change, apart = (expected - given).norm(dim=-1), (got - expected).norm(dim=-1)
    bound = of_change * change + of_output * expected.norm(dim=-1)
    return fused if bool((apart <= bound).all()) else None  # NaN is above any bound


def _form(layer: nn.Module) -> tuple[str, str | None, str, str | None] | None:
    """Return the form with exactly these children; dropouts do nothing in a served model."""
    children = {
        name: child
        for name, child in layer.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity)
    }
    for form in _FORMS:
        norms = {name for name in form if name is not None}
        if set(children) == norms | _BLOCKS and all(
            isinstance(children[name], GpuRmsNorm) and children[name].weight.dtype in _ROUNDING
            for name in norms
        ):
            return form
    return None


def use_fewer_kernels(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Replace the modules of a patched model by others that launch fewer kernels, in place.

    `groups`: names of linears that read one tensor (merged_linear.shared_inputs finds them). A
    module with outputs of its own kind keeps its form.
    """
    join(model, groups)
    replace_norms(model, candidates)
    fuse_gates(model)
