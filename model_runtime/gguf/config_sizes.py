"""The sizes of a GGUF file's model: layers, heads, widths, vocabulary and length."""

from model_runtime.config_limits import impossible
from model_runtime.errors import ModelError
from model_runtime.gguf.fields import Fields
from model_runtime.gguf.file import GgufFile


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
