"""Tiny random models of real architectures.

One-dimensional parameters (norms, biases) are random too, and there are four layers or more, so
that every kind of layer is there: with norms left at one, several wrong take-overs look right.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 199

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_FOUR_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

# architecture -> what its config needs beyond the shape
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
    "cohere2": {"layer_types": _FOUR_LAYERS, "sliding_window": 24},
    "gemma3_text": {"head_dim": 16, "layer_types": _FOUR_LAYERS, "sliding_window": 24},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"layer_types": _FOUR_LAYERS, "sliding_window": 24},
    "exaone4": {"layer_types": _FOUR_LAYERS, "sliding_window": 24},
    "seed_oss": {"head_dim": 16},
    "starcoder2": {"sliding_window": 24},
    "ministral": {"head_dim": 16, "layer_types": _FOUR_LAYERS, "sliding_window": 24},
    # Its own chunks of 256 tokens take eight gigabytes in transformers 5.17.
    "falcon_h1": {"mamba_chunk_size": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "qwen3_next": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mistral": {"sliding_window": 24},
    "lfm2": {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
}


def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in float32, on the CPU, in eval mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        architecture, **{**_SHAPE, **SPECIAL.get(architecture, {}), **overrides}
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                # Large enough that attention is sharp and decides what comes out.
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with weights of a dtype; its rotary tables stay float32, as in a loaded one."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
