"""The sizes of a GGUF file's model: layers, heads, widths, vocabulary and length."""

import math

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.config_limits import impossible
from ropewalk.model_runtime.formats.gguf.gguf_config import ROPE_TENSORS, Fields
from ropewalk.model_runtime.formats.gguf.gguf_file import GgufFile, TensorInfo

_KEY_HEADS, _NUM_EXTRA = "attention.head_count_kv", "nextn_predict_layers"


def config_sizes(
    fields: Fields, model_type: str, *, has_layers_without_keys: bool
) -> dict[str, int]:
    """Return the sizes by transformers' names. Raises ModelError for those that no model can have.

    `model_type`: transformers' word for the architecture. Files may count heads that predict
    further tokens among the layers.
    """
    num_layers = fields.integer("block_count")
    if num_layers > len(fields.file.tensors):  # before anything is built for each of them
        raise fields.refuse(
            "block_count", f"is {num_layers}, and the file has {len(fields.file.tensors)} tensors"
        )
    num_extra = fields.integer(_NUM_EXTRA, 0, minimum=0)
    if num_extra >= num_layers:
        raise fields.refuse(_NUM_EXTRA, f"must be < {num_layers}, got {num_extra}")
    num_layers -= num_extra
    hidden_size, num_heads = (
        fields.integer("embedding_length"),
        fields.integer("attention.head_count"),
    )
    sizes = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_key_heads(
            fields, num_heads, may_be_zero=has_layers_without_keys
        ),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": _vocab_size(fields.file),
    }
    # A mixture may have no other width than that of its experts.
    if fields.has("feed_forward_length") or not fields.has("expert_feed_forward_length"):
        sizes["intermediate_size"] = fields.integer("feed_forward_length")
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


def _num_key_heads(fields: Fields, num_heads: int, *, may_be_zero: bool) -> int:
    """Return the key heads of a layer; some layers have none, if they may."""
    stated = fields.value(_KEY_HEADS)
    if may_be_zero and isinstance(stated, list):
        others = {each for each in stated if each != 0}
        if len(others) == 1 and all(type(each) is int and each > 0 for each in others):
            return int(others.pop())
    return fields.integer(_KEY_HEADS, num_heads)


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


def served_tensors(file: GgufFile) -> dict[str, TensorInfo]:
    """Return a file's tensors without rotary factors and heads that predict further tokens."""
    block, extra = f"{file.architecture}.block_count", f"{file.architecture}.{_NUM_EXTRA}"
    first = file.integer(block, 0, minimum=0) - file.integer(extra, 0, minimum=0)
    return {
        name: info
        for name, info in file.tensors.items()
        if name not in ROPE_TENSORS and not (extra in file.metadata and _block(name) >= first)
    }


def _block(name: str) -> int:
    """Return the number of a tensor's layer; -1 for a tensor outside of layers."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1:] and parts[1].isdecimal() else -1


def num_parameters(file: GgufFile) -> int:
    return sum(math.prod(info.shape) for info in served_tensors(file).values())


def storage_of(file: GgufFile) -> tuple[int, str]:
    """Return the size of a file in bytes, and the number types of its tensors by their values."""
    values: dict[str, int] = {}
    for info in file.tensors.values():
        values[info.type_name] = values.get(info.type_name, 0) + math.prod(info.shape)
    names = sorted(values, key=lambda name: (-values[name], name))
    return file.num_bytes, ", ".join(names)
