"""Configs read without transformers, against the same files read with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ropewalk.model_runtime.attention.token_bytes import bytes_per_token
from ropewalk.model_runtime.loading import known_products
from ropewalk.model_runtime.loading.known_products import Words, expected_computing
from ropewalk.model_runtime.loading.model_config import (
    EMBEDDED_MODEL,
    ModelConfig,
    read_model_config,
    read_outline,
)
from ropewalk.model_runtime.loading.plain_config import (
    PLAIN_TYPES,
    PlainConfig,
    PlainDevice,
    PlainNumberType,
    plain_config,
    plain_number_type,
    plain_templates,
)
from tests.checkpoints.tiny_models import tiny_model

FLOAT32, CPU = PlainNumberType("float32", 4), PlainDevice()
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "vocab_size": 99,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def both(folder: Path) -> tuple[ModelConfig, ModelConfig]:
    """A folder's config, read without transformers and with it."""
    plain = plain_config(folder)
    assert plain is not None
    full = AutoConfig.from_pretrained(folder)
    return (
        ModelConfig("x", plain, FLOAT32, CPU),
        ModelConfig("x", full, torch.float32, torch.device("cpu")),
    )


def assert_equal(plain: ModelConfig, full: ModelConfig) -> None:
    """Compare all that planning reads."""
    assert plain.architecture == full.architecture
    assert plain.native() == full.native()
    assert plain.layers() == full.layers()
    assert plain.config.tie_word_embeddings == full.config.tie_word_embeddings
    assert bytes_per_token(plain.layers(), plain.dtype) == bytes_per_token(
        full.layers(), full.dtype
    )


@pytest.mark.parametrize("model_type", sorted(PLAIN_TYPES))
def test_a_plain_config_says_what_transformers_says(model_type: str, tmp_path: Path) -> None:
    """The file is written by transformers itself."""
    config = tiny_model(model_type).config
    config.architectures = ["Any"]
    config.save_pretrained(tmp_path)
    assert_equal(*both(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
        {"head_dim": 32},
    ],
)
def test_a_config_of_transformers_4_says_the_same(change: dict[str, Any], tmp_path: Path) -> None:
    """Most checkpoints on the hub have the base beside the block."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    assert_equal(*both(tmp_path))


def test_dual_chunk_attention_is_read_with_and_without_transformers(tmp_path: Path) -> None:
    """Neither reading takes 1,010,000 tokens for the trained length."""
    trained = 262_144
    block = {"chunk_size": trained, "local_size": 8192, "original_max_position_embeddings": trained}
    values = {
        **LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 1_010_000,
        "dual_chunk_attention_config": block,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert [config.native().native_len for config in both(tmp_path)] == [trained, trained]


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma3_text"},
        {"num_key_value_heads": None},
        {"num_hidden_layers": "2"},
        {"rope_theta": None, "rope_scaling": [1]},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"auto_map": {}},
        {"partial_rotary_factor": 0.5},
        {"architectures": None},
    ],
)
def test_any_other_config_is_left_to_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    """A value that is absent or unusual may mean something that only transformers knows."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    assert plain_config(tmp_path) is None


def test_a_broken_file_is_left_to_transformers(tmp_path: Path) -> None:
    """transformers then says what is wrong, in the words that `serve` uses."""
    assert plain_config(tmp_path) is None
    (tmp_path / "config.json").write_text("[")
    assert plain_config(tmp_path) is None
    assert plain_templates(tmp_path) is None
    assert plain_number_type("float16") is None


def test_the_embedded_model_is_plain() -> None:
    """Both ways give the same sizes and the same template."""
    plain, full = read_outline(EMBEDDED_MODEL, device="cpu"), read_model_config(EMBEDDED_MODEL)
    assert isinstance(plain.config, PlainConfig)
    assert_equal(plain, full)
    assert plain.num_weight_bytes() == full.num_weight_bytes()
    template = (EMBEDDED_MODEL / "chat_template.jinja").read_text()
    assert plain_templates(EMBEDDED_MODEL) == {"default": template}


def test_trials_are_remembered_for_the_same_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that hides instructions from a library makes the memory void."""
    tried: list[str] = []

    def words(_: torch.device, name: str) -> Words:
        tried.append(name)
        return Words(f"products of {name}", "attention", "numbers")

    monkeypatch.setattr(known_products, "_tried", words)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        expected = Words("products of float32", "attention", "numbers")
        assert expected_computing(CPU, FLOAT32) == expected
    assert tried == ["float32"]
    assert expected_computing(CPU, PlainNumberType("bfloat16", 2))[0] == "products of bfloat16"
    assert expected_computing(CPU, FLOAT32)[0] == "products of float32"
    assert tried == ["float32", "bfloat16"]
    with monkeypatch.context() as hidden:
        hidden.setenv("ONEDNN_MAX_CPU_ISA", "AVX")  # as on no machine that runs this test
        expected_computing(CPU, FLOAT32)
    assert tried == ["float32", "bfloat16", "float32"]
    assert expected_computing(CPU, FLOAT32)[0] == "products of float32"
    assert len(tried) == 3, "one memory drops no other"
    for file in tmp_path.glob("ropewalk-trial-*.json"):
        file.write_text("no JSON")
    assert expected_computing(CPU, FLOAT32)[0] == "products of float32"
    assert len(tried) == 4
