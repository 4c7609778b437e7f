"""Find the models that the fused decoder can compute.

A model is recognised by the names and kinds of its modules, after gated_mlp.py, rms_norm.py and
packed_linear.py have replaced them. That is not proof of what the model computes. So
self_check.py compares the bits with the model's own forward, and restores that one if they
differ.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ropewalk.model_runtime.attention.paged_attention import AttentionCall, LayerPlan
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.fused_decoder import DecoderLayers, Kind, Layer
from ropewalk.model_runtime.layers.gated_mlp import GatedMlp
from ropewalk.model_runtime.layers.merged_linear import MergedPart
from ropewalk.model_runtime.layers.packed_linear import PackedLinear
from ropewalk.model_runtime.layers.packed_product import PackedProduct
from ropewalk.model_runtime.layers.rms_norm import RmsNorm
from ropewalk.model_runtime.probing.probe import are_equal, recorded_calls

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = {"q_norm", "k_norm"}
_FAR = 1 << 20  # a position that no short prompt has


def match_decoder(model: Any, plans: Mapping[int, LayerPlan]) -> DecoderLayers | None:
    """Return this forward for a plain decoder on a CPU; None if the model is something else.

    Nothing is tried here (equivalence.py), because a forward needs steps over a cache.
    `self_check.py` has them, and compares this forward with the model's own.
    """
    decoder = getattr(model, model.base_model_prefix, None)
    modules = getattr(decoder, "layers", None)
    final_norm = getattr(decoder, "norm", None)
    head = model.get_output_embeddings()
    if not (
        isinstance(modules, nn.ModuleList)
        and isinstance(final_norm, RmsNorm)
        and isinstance(head, PackedLinear)
        and len(modules) == len(plans)
    ):
        return None
    calls = recorded_calls(model)
    if not _know_no_positions(model, calls):
        return None
    found = [_match_layer(module, plans, calls) for module in modules]
    layers = [layer for layer in found if layer is not None]
    if [layer.index for layer in layers] != sorted(plans):  # pages are looked up in this order
        return None
    kinds = {_kind(each, plans, calls) for each in layers}
    norms = [final_norm]
    width = len(final_norm.scale_D)
    if head.product.in_features != width or len(layers[0].norm.scale_D) != width:
        return None
    for layer in layers:
        norms += [layer.norm, layer.block_norm, *layer.head_norms]
    if len(kinds) > 1 or len({float(norm.eps) for norm in norms}) > 1:
        return None
    (kind,) = kinds
    return DecoderLayers(model, layers, final_norm, kind, plans)


def _know_no_positions(model: nn.Module, calls: Mapping[int, AttentionCall]) -> bool:
    """Return whether queries and keys depend on their positions by rotation alone."""
    try:
        far = recorded_calls(model, first_position=_FAR)
    except ModelError:  # the model looks up a table by position, and the position is outside
        return False
    return all(are_equal(call, far[index]) for index, call in calls.items())


def _kind(layer: Layer, plans: Mapping[int, LayerPlan], calls: Mapping[int, AttentionCall]) -> Kind:
    call = calls[layer.index]
    num_heads, num_between = call.query_1HTD.shape[1], layer.block.down.in_features
    return Kind(plans[layer.index], num_heads, call.scaling, len(layer.head_norms), num_between)


def _match_layer(
    module: nn.Module, plans: Mapping[int, LayerPlan], calls: Mapping[int, AttentionCall]
) -> Layer | None:
    """Return a layer that consists of these parts and has plain attention, or None."""
    parts: dict[str, Any] = dict(module.named_children())
    attention = parts.get("self_attn")
    index: int = getattr(attention, "layer_idx", -1)
    if attention is None or set(parts) != _LAYER or index not in plans:
        return None
    children: dict[str, Any] = dict(attention.named_children())
    projections = [children.pop(name, None) for name in _PROJECTIONS]
    output = children.pop("o_proj", None)
    norms, block = (parts["input_layernorm"], parts["post_attention_layernorm"]), parts["mlp"]
    head_norms = tuple(children[name] for name in sorted(children, reverse=True))
    call, plan = calls[index], plans[index]
    if not (
        set(children) in (set(), _HEAD_NORMS)
        and all(isinstance(norm, RmsNorm) for norm in (*norms, *head_norms))
        and all(isinstance(each, MergedPart) for each in projections)
        and len({id(each.product) for each in projections}) == 1
        and isinstance(projections[0].product, PackedProduct)
        and isinstance(output, PackedLinear)
        and isinstance(block, GatedMlp)
        and plan.has_cache_order
        and call.sliding_window is None
        and call.softcap is None
        and call.sinks_H is None
    ):
        return None
    num_heads, width = call.query_1HTD.shape[1], len(norms[0].scale_D)
    joined = projections[0].product
    num_joined = num_heads * plan.key_dim + plan.num_key_heads * (plan.key_dim + plan.value_dim)
    # The kernel gets addresses only, and does not check these lengths.
    lengths = {
        *((len(norm.scale_D), plan.key_dim) for norm in head_norms),
        (len(norms[1].scale_D), width),
        (joined.in_features, width),
        (joined.out_features, num_joined),
        (output.in_features, num_heads * plan.value_dim),
        (output.out_features, width),
        (block.gate_up.in_features, width),
        (block.down.out_features, width),
    }
    if any(found != needed for found, needed in lengths):
        return None
    return Layer(index, norms[0], joined, head_norms, output.product, norms[1], block)
