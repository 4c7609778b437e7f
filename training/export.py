"""Export of a trained network to a folder that transformers can load."""

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from training.network import Network
from training.shape import Shape
from training.tokenizer import BOS_ID, EOS_ID


def save_model(network: Network, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors, in bfloat16."""
    model = empty_model(network.shape)
    weights = {f"model.{name}": each for name, each in network.state_dict().items()}
    problems = model.load_state_dict(weights, strict=False)
    assert problems.missing_keys == ["lm_head.weight"]  # tied to the embedding
    assert not problems.unexpected_keys
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.to(torch.bfloat16).save_pretrained(folder)


def empty_model(shape: Shape) -> PreTrainedModel:
    """Build a transformers model of that shape, with the weights that transformers draws."""
    common = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.native_len,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    if shape.qkv_bias:
        return Qwen2ForCausalLM(Qwen2Config(**common))
    return LlamaForCausalLM(LlamaConfig(head_dim=shape.head_dim, **common))
