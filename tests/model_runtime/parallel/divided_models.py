"""Tiny models that can be divided among four processes, and the processes."""

import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.parallel.ranks import Ranks
from tests.checkpoints.tiny_models import SPECIAL, tiny_config, tiny_model
from tests.doubles.tokens import byte_tokenizer_fast

# Those of tests/models_page.py whose plan in transformers is one of columns and rows.
DIVIDED = (
    *("cohere2_vision", "exaone4_5", "idefics3", "internvl", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "smolvlm", "voxtral"),
    *("apertus", "arcee", "cohere", "cohere2", "cohere_compass_text", "cwm", "ernie4_5"),
    *("exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_unified"),
    *("gemma4_unified_text", "gpt_neox", "granite", "helium", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "llama", "ministral", "ministral3", "mistral", "nemotron", "olmo"),
    *("phi", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2", "vaultgemma"),
)
# Heads are divisible by four. The feed-forward width and the vocabulary are not: their last parts
# are short.
SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 2,
}
# Parts of these are whole panels of packed weights.
WIDE = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "vocab_size": 2048}


def overrides_of(architecture: str, **values: Any) -> dict[str, Any]:
    """Values of a tiny config with which four ranks can share its heads."""
    special = SPECIAL.get(architecture, {})
    nested = special.get("text_config", special)
    values = {**SHAPE, **values}
    if "layer_types" in nested:
        values.setdefault("layer_types", ["sliding_attention", "full_attention"])
    block = nested.get("rope_parameters", {})
    if "mrope_section" in block:
        values.setdefault("rope_parameters", {**block, "mrope_section": [1, 1, 2]})
    if "activation_sparsity_pattern" in nested:
        values.setdefault("activation_sparsity_pattern", [0.0, 0.0])
    return {"text_config": {**nested, **values}} if "text_config" in special else values


def outline_of(architecture: str, **values: Any) -> ModelConfig:
    """The outline of a tiny model without weights."""
    config = tiny_config(architecture, **overrides_of(architecture, **values))
    return ModelConfig(architecture, config, torch.float32, torch.device("cpu"))


_folders: list[Path] = []


def remove_folders() -> None:
    """Remove the folders of all models; workers of xdist end without `atexit`."""
    for folder in _folders:
        shutil.rmtree(folder)
    _folders.clear()
    folder_of.cache_clear()


@cache
def folder_of(architecture: str, *, is_wide: bool = False) -> Path:
    """A folder with a tiny or a wide model in float32; it is made once a run."""
    folder = Path(mkdtemp(prefix=f"divided-{architecture}-"))
    _folders.append(folder)
    values = WIDE if is_wide else {}
    tiny_model(architecture, **overrides_of(architecture, **values)).save_pretrained(folder)
    byte_tokenizer_fast().save_pretrained(folder)
    return folder


@cache
def whole(architecture: str, dtype: str = "float32", *, is_wide: bool = False) -> Checkpoint:
    """The model in this process alone."""
    return load_checkpoint(folder_of(architecture, is_wide=is_wide), dtype=dtype)


def divided(
    ranks: Ranks, architecture: str, dtype: str = "float32", *, is_wide: bool = False
) -> Checkpoint:
    """This rank's share of the model; the followers load theirs."""
    folder = folder_of(architecture, is_wide=is_wide)

    def load(**division: Any) -> Checkpoint:
        return load_checkpoint(folder, dtype=dtype, device="cpu", **division)

    return ranks.load(load, folder, dtype=dtype, device="cpu", trust_remote_code=False)
