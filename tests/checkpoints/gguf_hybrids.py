"""The weights of models with states as llama.cpp's converters write them.

Sources: `conversion/qwen.py` and `conversion/lfm2.py` of llama.cpp.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def converted(
    name: str, values: np.ndarray, config: Any, architecture: str, *, is_old: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a weight, under the names that gguf's table knows, with their suffix.

    `is_old`: Qwen 3 Next's joined projection stays whole, as in files of 2025.
    """
    delta = ".linear_attn." in name
    if delta and architecture in ("qwen35", "qwen35moe"):
        values = _tiled(name, values, config)
    if name.endswith(".A_log"):
        values = -torch.from_numpy(values).exp().numpy()
    if "conv1d" in name or "conv.conv" in name:
        values = values.squeeze(1)
    if name.endswith(".in_proj_qkvz.weight") and not is_old:
        yield from _parted(name.removesuffix("qkvz.weight"), values, config)
        return
    renamed = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    yield renamed, values


def _tiled(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Put the first value head of every key head first, then the second of every key head."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // keys

    def swapped(part: np.ndarray, head_width: int) -> np.ndarray:
        heads = part.reshape(keys, each, head_width, *part.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(part.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        before = 2 * keys * config.linear_key_head_dim
        return np.concatenate([values[:before], swapped(values[before:], width)])
    if "in_proj_z" in name:
        return swapped(values, width)
    if "out_proj" in name:
        return np.ascontiguousarray(swapped(values.T.copy(), width).T)
    return values if ".norm." in name else swapped(values, 1)


def _parted(stem: str, values: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Queries, keys and values of all heads in one tensor, and the gates in another."""
    keys, key_width = config.linear_num_key_heads, config.linear_key_head_dim
    width = config.linear_num_value_heads // keys * config.linear_value_head_dim
    heads = values.reshape(keys, 2 * (key_width + width), -1)
    ends = np.cumsum([key_width, key_width, width])
    query, key, value, gate = (
        part.reshape(-1, values.shape[1]) for part in np.split(heads, ends, axis=1)
    )
    yield f"{stem}qkv.weight", np.concatenate([query, key, value])
    yield f"{stem}z.weight", gate


def delta_metadata(architecture: str, **sizes: Any) -> dict[str, Any]:
    """The keys of a tiny model with Gated DeltaNet: 2 key heads and 4 value heads of 16."""
    own = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
        "full_attention_interval": 4,
        "rope.dimension_count": 4,
        **sizes,
    }
    return {f"{architecture}.{key}": value for key, value in own.items()}
