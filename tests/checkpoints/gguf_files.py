"""Models of transformers written as GGUF files, in the way llama.cpp's converters write them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.checkpoints.gguf_hybrids import converted

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, Type]]
# transformers' config -> metadata, for the architectures without keys of their own
_NUMBERS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
_MOE_NUMBERS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def as_float32(_: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
    """Store a tensor as it is."""
    return values, Type.F32


def quantised(kind: Type) -> Encode:
    """Store matrices in a type that gguf can write; norms and biases in float32."""

    def encode(_: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
        if values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            return values, Type.F32
        return gguf.quants.quantize(values, kind), kind

    return encode


@dataclass
class Written:
    """The changes of a test to a file before it is written."""

    metadata: dict[str, Any] = field(default_factory=dict)  # added, or replaced; None removes
    tensors: dict[str, np.ndarray | None] = field(default_factory=dict)  # the same
    encode: Encode = as_float32


def interleaved_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the two rows of each rotated pair side by side, as converters of Llama do."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def byte_vocabulary(size: int) -> dict[str, Any]:
    """A tokenizer of single bytes, one merge, two control tokens, and fillers up to `size`."""
    letters = sorted(bytes_to_unicode().values())
    tokens = ["<|begin|>", "<|end|>", *letters, "ab"][:size]
    fillers = [f"[PAD{index}]" for index in range(len(tokens), size)]
    types = [3, 3, *[1] * (len(tokens) - 2), *[5] * len(fillers)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *fillers],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"] if "ab" in tokens else [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def config_metadata(architecture: str, config: Any) -> dict[str, Any]:
    """The keys that every converter writes."""
    values = config.to_dict()
    found: dict[str, Any] = {"general.architecture": architecture}
    for name, key in {**_NUMBERS, **_MOE_NUMBERS}.items():
        if values.get(name) is not None:
            found[f"{architecture}.{key}"] = int(values[name])
    for name in ("rms_norm_eps", "norm_eps"):
        if values.get(name) is not None:
            found[f"{architecture}.attention.layer_norm_rms_epsilon"] = values[name]
    if values.get("head_dim"):
        found[f"{architecture}.attention.key_length"] = values["head_dim"]
        found[f"{architecture}.attention.value_length"] = values["head_dim"]
    for name in ("layer_norm_eps", "norm_epsilon"):
        if values.get(name) is not None:
            found[f"{architecture}.attention.layer_norm_epsilon"] = values[name]
    block = values.get("rope_parameters") or {}
    block = block.get("full_attention", block)
    if "rope_theta" in block:
        found[f"{architecture}.rope.freq_base"] = float(block["rope_theta"])
    return found


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    written: Written | None = None,
    *,
    permuted: bool = False,
    norm_offset: float = 0.0,
    is_old: bool = False,
) -> Path:
    """Write a model's weights, config and a byte vocabulary to a GGUF file."""
    written = written or Written()
    config = model.config
    metadata = config_metadata(architecture, config) | byte_vocabulary(config.vocab_size)
    tensors = file_tensors(
        model, architecture, permuted=permuted, norm_offset=norm_offset, is_old=is_old
    )
    return write_file(
        path, {**metadata, **written.metadata}, {**tensors, **written.tensors}, written.encode
    )


def file_tensors(
    model: PreTrainedModel,
    architecture: str,
    *,
    permuted: bool,
    norm_offset: float,
    is_old: bool = False,
) -> dict[str, np.ndarray | None]:
    """The tensors of a file, from the weights of a model."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, np.ndarray | None] = {}
    weights = (
        pair
        for name, tensor in model.state_dict().items()
        for pair in converted(name, tensor.float().numpy(), config, architecture, is_old=is_old)
    )
    for name, values in weights:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if permuted and ".q_proj." in name:
            values = interleaved_rows(values, config.num_attention_heads)  # noqa: PLW2901
        if permuted and ".k_proj." in name:
            values = interleaved_rows(values, config.num_key_value_heads)  # noqa: PLW2901
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(norm_offset)  # noqa: PLW2901
        if name.endswith("experts.gate_up_proj"):
            module = name.removesuffix("gate_up_proj")
            for part, each in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                found[f"{names.get_name(f'{module}{part}_proj')}.weight"] = each
            continue
        if name.endswith(".A_log"):
            found[str(names.get_name(name))] = values
            continue
        module, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            module, suffix = name, "weight"
        found[f"{names.get_name(module)}.{suffix}"] = values
    return found


def write_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | None],
    encode: Encode = as_float32,
) -> Path:
    """Write a GGUF file with gguf's own writer."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        if values is not None:
            stored, kind = encode(name, np.ascontiguousarray(values, np.float32))
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_weights(loaded: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Whether two models have the same weights, to the bit.

    A file has the exp of `A_log`, so this is compared.
    """
    own = loaded.state_dict()
    return all(
        torch.equal(own[name].exp(), each.exp())
        if name.endswith(".A_log")
        else torch.equal(own[name], each)
        for name, each in model.state_dict().items()
    )
