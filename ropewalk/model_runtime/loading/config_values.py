"""Read what a model's config says about its text decoder, and refuse what is not served.

The self-check's prompts have 48 tokens. Attention that changes later, after thousands of tokens,
looks right to it. So such attention is recognised by the fields of the config.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.config_limits import impossible
from ropewalk.model_runtime.gpu_nodes import has_gpu_kernels
from ropewalk.model_runtime.json_files import read_object
from ropewalk.model_runtime.state_shape import StateShape

_BY_INDEX = "an index chooses the keys that a query sees"
# A field that is set -> the attention that it switches on.
_UNSERVED = {
    "index_topk": _BY_INDEX,  # DeepSeek-V3.2, GLM-5
    "index_topk_blocks": _BY_INDEX,  # MiniMax-M3
    "indexer_budget": _BY_INDEX,  # Qwen4
    "attention_chunk_size": "a query sees the keys of its own chunk only",  # Llama 4
    "attn_temperature_tuning": "queries grow with a position that the layer counts by itself",
}


def text_values(config: Any) -> dict[str, Any]:
    """Return the config of the text decoder as a dict, with the general names of its fields.

    A class may have names of its own, for example `qk_rope_head_dim` for `head_dim`.
    """
    text: Any = config.get_text_config()
    values: dict[str, Any] = text.to_dict()
    aliases: Mapping[str, str] = getattr(text, "attribute_map", {})
    for general, own in aliases.items():
        if values.get(general) is None and own in values:
            values[general] = values[own]
    return values


def state_shapes(values: Mapping[str, Any]) -> dict[int, StateShape]:
    """Return the states of the config's layers by index; empty for a model without them.

    Taking over the loaded model finds the same shapes for the architectures in
    docs/reference/models.md.
    """
    kinds = {}
    if type(values.get("conv_L_cache")) is int:
        kinds["conv"] = StateShape(values["conv_L_cache"] - 1, values["hidden_size"])
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes: list[Any] = [values.get(f"linear_{name}") for name in (*names, "conv_kernel_dim")]
    # OLMo Hybrid has these fields, too, and a convolution each of queries, keys and values.
    is_olmo = "linear_allow_neg_eigval" in values
    if all(type(each) is int for each in sizes) and not is_olmo:
        num_key_heads, num_heads, key_dim, dim, num_taps = sizes
        num_channels = 2 * num_key_heads * key_dim + num_heads * dim
        kinds["linear_attention"] = StateShape(num_taps - 1, num_channels, num_heads, key_dim, dim)
    types = values.get("layer_types")
    if not kinds or not isinstance(types, list | tuple):
        return {}
    types = types[: values.get("num_hidden_layers")]
    return {
        index: kinds[each]
        for index, each in enumerate(types)
        if isinstance(each, str) and each in kinds
    }


def refuse_states_elsewhere(name: str, values: Mapping[str, Any], device: Any) -> None:
    """Raise ModelError for a model with states on a device without kernels for them."""
    if device.type != "cpu" and not has_gpu_kernels(device) and state_shapes(values):
        raise ModelError(
            f"{name} has layers that keep a state of each sequence, which are served on a CPU, or "
            f"on a CUDA device if triton is installed, got device {device}"
        )


def refuse_unserved_attention(name: str, values: Mapping[str, Any]) -> None:
    """Raise ModelError for attention that the self-check is too short to see."""
    for field, meaning in _UNSERVED.items():
        if values.get(field):
            raise ModelError(
                f"{name}: {field}: is {values[field]!r}, so {meaning}, which is not served yet"
            )


def check_values(path: Path) -> None:
    """Raise ModelError for a number of the config that no model can have, or an older word."""
    values = read_object(path) or {}
    parts = [each for name, each in values.items() if name.endswith("_config")]
    for each in (values, *(part for part in parts if isinstance(part, dict))):
        found = impossible(each)
        if found is not None:
            raise ModelError(f"{path}: {found[0]} {found[1]}")
        block = each.get("rope_scaling") or each.get("rope_parameters")
        if isinstance(block, dict) and block.get("rope_type", block.get("type")) == "su":
            # transformers knows that, and ends in a KeyError because it reads the length before.
            raise ModelError(f"{path}: rope_scaling: type 'su' is 'longrope' today: write that")
