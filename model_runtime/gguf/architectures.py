"""The architectures that are read: each file's metadata as a config of transformers.

Sources: llama.cpp's converters (the folder `conversion`), which wrote the files, and its model
graphs for what they leave out. tests/gguf_page.py writes the table of docs/gguf.md from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_runtime.errors import ModelError
from model_runtime.gguf.fields import Fields
from model_runtime.gguf.file import GgufFile
from model_runtime.gguf.rope_block import rope_block

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one architecture become a model of transformers."""

    model_type: str
    class_name: str
    config: Callable[[Fields], Config]  # what the common fields do not say
    are_pairs_adjacent: bool = False  # rows of q and k are stored with the two of a pair together
    norm_offset: float = 0.0  # converters add one to the weights of norms


def architecture_of(file: GgufFile) -> Architecture:
    """Return the file's architecture. Raises ModelError with the name of one that is not read."""
    name = file.architecture
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{file.path}: general.architecture {name} is not read from GGUF; read are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    if name == "llama" and f"{name}.expert_count" in file.metadata:
        return _MIXTRAL
    return found


def config_of(file: GgufFile) -> Config:
    """Return the file's config as transformers writes it. Raises ModelError."""
    kind = architecture_of(file)
    fields = Fields(file)
    config = _common(fields) | kind.config(fields)
    fields.check_all_read()
    return config | {"model_type": kind.model_type, "architectures": [kind.class_name]}


def _common(fields: Fields) -> Config:
    num_heads = fields.integer("attention.head_count")
    hidden_size, max_len = fields.integer("embedding_length"), fields.integer("context_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    value_dim = fields.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise fields.refuse("attention.value_length", f"must be {head_dim}, got {value_dim}")
    if not fields.boolean("attention.causal", default=True):
        raise fields.refuse("attention.causal", "is false: the model writes no text")
    config: Config = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "num_hidden_layers": fields.integer("block_count"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "max_position_embeddings": max_len,
        "vocab_size": _vocab_size(fields.file),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
        "rope_parameters": rope_block(fields, head_dim, max_len),
        "use_cache": True,
    }
    return config | _special_tokens(fields.file)


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no tensor token_embd.weight of two dimensions")
    return embedding.shape[0]


def _special_tokens(file: GgufFile) -> Config:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: each for name, each in ids.items() if type(each) is int}


def _biases(fields: Fields) -> Config:
    """Return whether Llama's linears have biases; transformers has them in all or in none."""
    return {
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
    }


def _mixtral(fields: Fields) -> Config:
    return {
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(_: Fields) -> Config:
    return {"use_sliding_window": False}


def _qwen3(fields: Fields) -> Config:
    return {
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "use_sliding_window": False,
    }


def _qwen3_moe(fields: Fields) -> Config:
    return _qwen3(fields) | {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's graph, which reads no key for it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, are_pairs_adjacent=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _biases, are_pairs_adjacent=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
}
