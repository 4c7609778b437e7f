"""The losses of a cache in few bits stay within their bounds, with a large bias of keys, too."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.cache.kv_cache import held
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.corpus.held_out import library_documents

TOKENS, ROWS = 256, 128
MOST_KL = {"bfloat16": 0.0003, "int8": 0.00001, "k8v4": 0.0005, "int4": 0.002}
BIAS = 92.8  # the largest of layer 0 of Qwen 2.5 0.5B


def with_bias(folder: Path) -> Path:
    """The embedded model as one of Qwen 2, whose slowest channels of keys have a large bias.

    A bias that hardly turns adds nearly the same to all scores of a row.
    """
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    dim = config["head_dim"]
    for name, num_heads in (
        ("q", config["num_attention_heads"]),
        *((each, config["num_key_value_heads"]) for each in "kv"),
    ):
        for layer in range(config["num_hidden_layers"]):
            bias_KD = torch.zeros(num_heads, dim)
            if name == "k":
                bias_KD[:, [dim // 2 - 1, dim - 1]] = torch.tensor([BIAS, -BIAS])
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias_KD.flatten()
    folder.mkdir()
    for path in EMBEDDED_MODEL.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_losses_are_within_their_bounds(
    embedded: Checkpoint, tmp_path: Path, *, has_bias: bool
) -> None:
    """Against the exact cache of the same model, over held-out text."""
    checkpoint = load_checkpoint(with_bias(tmp_path / "biased")) if has_bias else embedded
    text = "\n".join(each.text for each in library_documents(held_out=True))[: 8 * TOKENS]
    ids = list(checkpoint.tokenizer.encode(text, add_special_tokens=True, param="text"))[:TOKENS]
    assert len(ids) == TOKENS
    exact_RV = held(checkpoint, "auto", TOKENS + 64).scored(ids, ROWS)
    for kind, most in MOST_KL.items():
        found_RV = held(checkpoint, kind, TOKENS + 64).scored(ids, ROWS)
        kl = float((exact_RV.exp() * (exact_RV - found_RV)).sum(-1).mean())
        assert 0 < kl < most, kind
