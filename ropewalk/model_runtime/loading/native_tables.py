"""Read a model's rotary tables from its config, and compare them with those that it computes."""

from typing import Any

import torch
from torch import nn

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.config_values import refuse_unserved_attention, text_values
from ropewalk.model_runtime.probing.untouched import rotary_modules
from ropewalk.rope import ALL_LAYERS, NativeRope, RopeConfigError, native_rope

NO_ROTATION = "has no rotary position embeddings that can be patched"


def read_native_rope(model: nn.Module) -> NativeRope:
    """Return the tables of the checkpoint's config, compared bit for bit with the model's.

    Raises ModelError if the model has no tables, other tables, or an unsupported rope block.
    """
    name = type(model).__name__
    modules = rotary_modules(model)
    if not modules:
        raise ModelError(f"{name} {NO_ROTATION}")
    values = text_values(model.config)
    refuse_unserved_attention(name, values)
    try:
        native = native_rope(values)
    except RopeConfigError as error:
        raise ModelError(f"{name}: {error}") from error
    for module, types in modules.values():
        for layer_type in types:
            _compare_table(name, module, layer_type, native)
    return native


def _compare_table(name: str, module: nn.Module, layer_type: str, native: NativeRope) -> None:
    if any(each.is_meta for each in module.buffers()):
        module = _with_numbers(module)
    prefix = "" if layer_type == ALL_LAYERS else f"{layer_type}_"
    held_P = getattr(module, f"{prefix}inv_freq").float().cpu()
    held_factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    table = native.tables.get(layer_type) or native.tables.get(ALL_LAYERS)
    if table is None:
        raise ModelError(f"{name} has a rotary table for {layer_type}, its config has none")
    own = table.frequencies()
    if not torch.equal(held_P, own.inv_freq_P) or held_factor != own.attention_factor:
        raise ModelError(
            f"{name} rotates {layer_type} layers by another table than its config says"
        )


def _with_numbers(module: Any) -> nn.Module:
    """Return a module like one without memory, with the tables that its class computes."""
    made: nn.Module = type(module)(module.config)
    return made
