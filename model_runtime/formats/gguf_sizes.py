"""The sizes of a GGUF file's model: layers, heads, widths, vocabulary and length."""

import math
from collections.abc import Mapping

from ropewalk.model_runtime.config_limits import impossible
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf_config import ROPE_TENSORS, Fields
from ropewalk.model_runtime.formats.gguf_file import GgufFile


def config_sizes(fields: Fields, model_type: str) -> dict[str, int]:
    """Return the sizes by transformers' names. Raises ModelError for those that no model can have.

    `model_type`: transformers' word for the architecture.
    """
    num_layers = fields.integer("block_count")
    if num_layers > len(fields.file.tensors):  # before anything is built for each of them
        raise fields.refuse(
            "block_count", f"is {num_layers}, and the file has {len(fields.file.tensors)} tensors"
        )
    hidden_size, num_heads = (
        fields.integer("embedding_length"),
        fields.integer("attention.head_count"),
    )
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "num_hidden_layers": num_layers,
        "intermediate_size": fields.integer("feed_forward_length"),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": _vocab_size(fields.file),
    }
    if fields.has("attention.key_length"):
        sizes["head_dim"] = fields.integer("attention.key_length")
    problem = impossible({**sizes, "model_type": model_type})
    if problem is not None:
        raise ModelError(f"{fields.file.path}: {problem[0]} {problem[1]}")
    head_dim = sizes.setdefault("head_dim", hidden_size // num_heads)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise fields.refuse("attention.value_length", f"must be {head_dim}, got {value_dim}")
    return sizes


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no tensor token_embd.weight of two dimensions")
    num_rows = embedding.shape[0]
    tokens = file.listed("tokenizer.ggml.tokens", str)
    if tokens is not None and len(tokens) > num_rows:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, and token_embd.weight "
            f"has {num_rows} rows"
        )
    return num_rows


# The file's names of sampling parameters -> ours.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def num_parameters(file: GgufFile) -> int:
    infos = file.tensors.items()
    return sum(math.prod(info.shape) for name, info in infos if name not in ROPE_TENSORS)


def storage_of(file: GgufFile) -> tuple[int, str]:
    """Return the size of a file in bytes, and the number types of its tensors by their values."""
    values: dict[str, int] = {}
    for info in file.tensors.values():
        values[info.type_name] = values.get(info.type_name, 0) + math.prod(info.shape)
    names = sorted(values, key=lambda name: (-values[name], name))
    return file.num_bytes, ", ".join(names)


def sampling_of(file: GgufFile) -> Mapping[str, float]:
    """Return the sampling parameters that the file recommends. Raises ModelError."""
    found: dict[str, float] = {}
    for key, name in _SAMPLING.items():
        full = f"general.sampling.{key}"
        if full in file.metadata:
            is_count = name == "top_k"
            found[name] = file.integer(full, minimum=0) if is_count else file.number(full)
    return found
