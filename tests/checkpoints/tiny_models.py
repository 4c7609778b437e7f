"""Tiny random models of real architectures.

One-dimensional parameters (norms, biases) are random too, and there are four layers or more, so
that every kind of layer is there: with norms left at one, several wrong take-overs look right.
"""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ropewalk.model_runtime.loading.text_part import factory_of

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
# Numbers that are replaced wherever a config has them.
_SMALL = {
    "head_dim": 16,
    "sliding_window": 24,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 64),
    # Multi-head latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Attention by an index, or in chunks
    **dict.fromkeys(("index_topk", "index_head_dim", "attention_chunk_size"), 16),
    "index_n_heads": 2,
    # Layers without attention
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    # Falcon H1's own chunks of 256 tokens take eight gigabytes in transformers 5.17.
    "mamba_chunk_size": 16,
    # Embeddings of each layer
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_TOWER_LAYERS = {"num_hidden_layers", "depth", "num_layers", "encoder_layers"}
_FOUR_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

_GEMMA_4 = {"layer_types": _FOUR_LAYERS, "global_head_dim": 32}
_QWEN_4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "ple_embed_dim": 32,
    "hc_lowrank": 8,
}
_IMAGES = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}

_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_HALF = {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_INTERLEAVED = {**_SECTIONS, "mrope_interleaved": True}
_TOWER = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32}
_TOWER |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
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
    "hunyuan_v1_dense": {"head_dim": 16},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "qwen3_next": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mistral": {"sliding_window": 24},
    "lfm2": {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "afmoe": {"global_attn_every_n_layers": 2},
    "bailing_hybrid": {"max_position_embeddings": 64, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 32},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 64},
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 64,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"text_config": {}},
    "fuyu": {"text_config": {}},
    "gemma3": {
        "text_config": {"layer_types": _FOUR_LAYERS},
        "vision_config": _IMAGES,
    },
    "gemma3n_text": {
        "layer_types": _FOUR_LAYERS,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "gemma4": {"text_config": _GEMMA_4, "vision_config": None, "audio_config": None},
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": {"text_config": _GEMMA_4, "vision_config": None, "audio_config": None},
    "gemma4_unified_text": _GEMMA_4,
    # The default of 1 makes logits so sharp that rounding alone changes them.
    "granite_swa": {"attention_multiplier": 0.25},
    "granitemoe_swa": {"attention_multiplier": 0.25},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "jetmoe": {"kv_channels": 16},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "moe_intermediate_size": 32,
    },
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "full_attention"]},
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "mimo_v2_flash": {"head_dim": 24},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "qwen4_exp": {"text_config": _QWEN_4},
    "qwen4_exp_text": _QWEN_4,
    "zamba2": {
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "chunk_size": 16,
        "use_mem_rope": True,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_query_groups": 4,
    },
    "codegen": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "qwen3_5": {"text_config": {}},
    "qwen3_5_moe": {"text_config": {}},
    **{name: {"text_config": {}} for name in ("idefics3", "internvl", "kimi_k25", "llava")},
    **{name: {"text_config": {}} for name in ("llava_next", "llava_onevision", "minicpmv4_6")},
    **{name: {"text_config": {}} for name in ("mistral3", "smolvlm", "voxtral")},
    "cohere2_vision": {"text_config": {}, "vision_config": _IMAGES},
    "exaone4_5": {"text_config": {"model_type": "exaone4"}, "vision_config": _TOWER},
    "lfm2_vl": {"text_config": {"full_attn_idxs": [1, 3], "block_multiple_of": 16}},
    **{
        name: {"text_config": {"rope_parameters": block}, "vision_config": _TOWER}
        for names, block in (
            (("glm4v", "glm4v_moe"), _HALF),
            (("qwen2_5_vl",), _SECTIONS),
            (("qwen3_vl", "qwen3_vl_moe"), _INTERLEAVED),
        )
        for name in names
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": _SECTIONS},
        "vision_config": {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 64},
    },
    "zaya": {"num_experts_per_tok": 1},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
}


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """The config of `tiny_model`."""
    values = {**SPECIAL.get(architecture, {}), **overrides}
    small, shape = _small_values(architecture), _SHAPE
    if "kv_lora_rank" in small:
        shape = {**_SHAPE, "num_key_value_heads": 4}
    if "text_config" in values:
        values["text_config"] = {**shape, **small, **values["text_config"]}
    else:
        values = {**shape, **small, **values}
    config = AutoConfig.for_model(architecture, **values)
    for name in config.sub_configs:
        tower = getattr(config, name)
        if tower is not None and tower is not config.get_text_config():
            for field in _TOWER_LAYERS & set(tower.to_dict()):
                setattr(tower, field, 1)
    return config


def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in float32, on the CPU, in eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **overrides)
    return randomised(factory_of(config).from_config(config))


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """The model with random numbers, in eval mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                # Large enough that attention is sharp and decides what comes out.
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


@cache
def _small_values(architecture: str) -> dict[str, Any]:
    """The numbers of a config's text decoder that are replaced by smaller ones."""
    own = AutoConfig.for_model(architecture).get_text_config().to_dict()
    small = {name: value for name, value in _SMALL.items() if type(own.get(name)) is int}
    if "kv_lora_rank" in small:
        small.pop("head_dim", None)  # such a config derives it
    return small


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with weights of a dtype; its rotary tables stay float32, as in a loaded one."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
