"""Rotation read from GGUF, against transformers' tables for the config that was converted."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_architectures import config_of
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import read_model_config
from tests.checkpoints.gguf_cases import CASES, Case
from tests.checkpoints.gguf_files import Written

LLAMA = next(case for case in CASES if case.name == "llama")
PHI3 = next(case for case in CASES if case.name == "phi3")
LONG = 131_072


def converters_divisors(
    head_dim: int, theta: float, factor: float, length: int = 8192
) -> np.ndarray:
    """`rope_freqs.weight` of Llama 3.1, a number at a time in float32, as converters compute it."""
    divisors = []
    for freq in 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)):
        wavelength = 2 * math.pi / freq
        if wavelength < length / 4:
            divisors.append(1.0)
        elif wavelength > length:
            divisors.append(factor)
        else:
            share = (length / wavelength - 1) / 3
            divisors.append(float(1 / ((1 - share) / factor + share)))
    return np.array(divisors, np.float32)


def stated(path: Path) -> dict[str, Any]:
    """The rope block of a file."""
    block: dict[str, Any] = config_of(read_gguf(path))["rope_parameters"]
    return block


def llama_with(path: Path, overrides: dict[str, Any], written: Written) -> Path:
    """Write a tiny Llama with a head of 64 dimensions."""
    shape = {"head_dim": 64, "max_position_embeddings": LONG, **overrides}
    return Case("llama", "llama", "llama", permuted=True, overrides=shape).write(path, written)


@pytest.mark.parametrize(
    ("factor", "length", "theta"), [(8.0, 8192, 500_000.0), (32.0, 8192, 12_000_000.0)]
)
def test_the_divisors_of_llama_3_give_the_table_of_its_config(
    tmp_path: Path, factor: float, length: int, theta: float
) -> None:
    """The file has a tensor only; the block is found, and the table has transformers' bits."""
    block = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": length,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    overrides = {"rope_parameters": block, "vocab_size": 300}
    divisors = converters_divisors(64, theta, factor, length)
    path = llama_with(
        tmp_path / "m.gguf", overrides, Written(tensors={"rope_freqs.weight": divisors})
    )
    assert stated(path) == block
    checkpoint = load_checkpoint(path, device="cpu")
    shape = {"head_dim": 64, "max_position_embeddings": LONG}
    model = Case("x", "llama", "llama", overrides={**shape, **overrides}).model()
    own = checkpoint.native.tables["all"].frequencies().inv_freq_P
    assert torch.equal(own, model.model.rotary_emb.inv_freq)
    assert not torch.equal(own, model.model.rotary_emb.inv_freq * 1.0000002)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    """Some converters write the tensor for every model."""
    ones = Written(tensors={"rope_freqs.weight": np.ones(32, np.float32)})
    assert stated(llama_with(tmp_path / "m.gguf", {}, ones))["rope_type"] == "default"


@pytest.mark.parametrize(
    "divisors",
    [np.linspace(1, 8, 32), np.full(32, 8.0), np.ones(31), np.full(32, np.nan), -np.ones(32)],
    ids=["ramp", "constant", "short", "nan", "negative"],
)
def test_divisors_that_no_setting_gives_are_refused(tmp_path: Path, divisors: np.ndarray) -> None:
    """The sentence names the tensor."""
    written = Written(tensors={"rope_freqs.weight": divisors.astype(np.float32)})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        stated(llama_with(tmp_path / "m.gguf", {}, written))


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32768,
    "llama.rope.scaling.finetuned": True,
}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {}),
        ({"llama.rope.scaling.type": "none"}, {}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, {}),
        ({"llama.rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.factor": 0.0}, {}),
        ({"llama.rope.scale_linear": 1.0}, {}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 8.0},
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            YARN,
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "finetuned": True,
            },
        ),
        (
            {**YARN, "llama.rope.scaling.finetuned": False},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        (
            {
                **YARN,
                "llama.rope.scaling.yarn_attn_factor": 1.2,
                "llama.rope.scaling.yarn_beta_fast": 24.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
                "llama.rope.scaling.yarn_ext_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "finetuned": True,
                "attention_factor": 1.2,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_scaling_keys_become_the_block_that_was_converted(
    tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Every number is the decimal of the config, not its nearest float32."""
    path = llama_with(tmp_path / "m.gguf", {}, Written(metadata=metadata))
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    assert stated(path) == {**plain, **expected}
    assert (
        read_model_config(path, device="cpu").native().method.scaling.rope_type
        == {
            **plain,
            **expected,
        }["rope_type"]
    )


def test_the_base_is_llama_cpps_default_if_the_file_has_none(tmp_path: Path) -> None:
    """Files of Gemma have no `rope.freq_base`."""
    written = Written(metadata={"llama.rope.freq_base": None})
    assert stated(llama_with(tmp_path / "m.gguf", {}, written))["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "su"),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.alpha", 1000.0),
        ("rope.dimension_sections", [16, 24, 24, 0]),
        ("rope.dimension_count_swa", 32),
        ("rope.freq_base_swa", 10000.0),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", "x"),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 128),
        ("rope.unheard_of", 1),
        ("attention.unheard_of", 1),
        ("attention.causal", False),
        ("attention.value_length", 32),
    ],
)
def test_a_key_that_is_not_understood_is_refused_by_name(
    tmp_path: Path, key: str, value: Any
) -> None:
    """Nothing that changes answers is dropped."""
    path = llama_with(tmp_path / "m.gguf", {}, Written(metadata={f"llama.{key}": value}))
    with pytest.raises(ModelError, match=rf"m\.gguf.*{key.replace('.', '[.]')}"):
        read_model_config(path, device="cpu").native()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("yarn_ext_factor", 0.0),
        ("yarn_log_multiplier", 0.1),
        ("attn_factor", 1.5),
        ("factor", 0.5),
        ("original_context_length", 0),
    ],
)
def test_a_yarn_that_transformers_does_not_have_is_refused(
    tmp_path: Path, key: str, value: float
) -> None:
    """The sentence names the key."""
    metadata = {**YARN, f"llama.rope.scaling.{key}": value}
    path = llama_with(tmp_path / "m.gguf", {}, Written(metadata=metadata))
    with pytest.raises(ModelError, match=key):
        stated(path)


@pytest.mark.parametrize("attention_factor", [None, 1.5])
def test_phi_3s_lists_become_longrope(tmp_path: Path, attention_factor: float | None) -> None:
    """Both tables and the attention factor have transformers' bits."""
    short = [round(1.0 + 0.1 * at, 1) for at in range(8)]
    long = [round(1.3 + 3.7 * at, 1) for at in range(8)]
    block: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 4096,
    }
    if attention_factor is not None:
        block["attention_factor"] = attention_factor
    own = math.sqrt(1 + math.log(LONG / 4096) / math.log(4096))
    metadata = {
        "phi3.rope.scaling.original_context_length": 4096,
        "phi3.rope.dimension_count": 16,
        "phi3.rope.scaling.attn_factor": attention_factor or own,
        "phi3.attention.sliding_window": 0,
    }
    overrides = {
        "max_position_embeddings": LONG,
        "original_max_position_embeddings": 4096,
        "rope_parameters": dict(block),
    }
    case = Case("phi3", "phi3", "phi3", overrides=overrides, metadata=metadata)
    tensors = {
        "rope_factors_short.weight": np.array(short, np.float32),
        "rope_factors_long.weight": np.array(long, np.float32),
    }
    path = case.write(tmp_path / "m.gguf", Written(tensors=tensors))
    found = stated(path)
    assert found == {"factor": LONG / 4096, **block}
    checkpoint = load_checkpoint(path, device="cpu")
    rotary = case.model().model.rotary_emb
    table = checkpoint.native.tables["all"].frequencies()
    assert torch.equal(table.inv_freq_P, rotary.inv_freq)
    assert table.attention_factor == rotary.attention_scaling


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    """LongRoPE needs both lists."""
    written = Written(tensors={"rope_factors_long.weight": np.ones(8, np.float32)})
    with pytest.raises(ModelError, match=r"rope_factors_short\.weight"):
        stated(PHI3.write(tmp_path / "m.gguf", written))


def test_gemma_3_scales_its_full_layers_only(tmp_path: Path) -> None:
    """The larger models have linear scaling on full layers, and another base on sliding ones."""
    gemma = next(case for case in CASES if case.name == "gemma3")
    metadata = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base": 1e6,
    }
    assert stated(gemma.write(tmp_path / "m.gguf", Written(metadata=metadata))) == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }


@pytest.mark.parametrize("is_finetuned", [False, True])
def test_a_block_that_reaches_beyond_the_context_length_was_added(
    tmp_path: Path, *, is_finetuned: bool
) -> None:
    """`rope.scaling.finetuned` says that a model was trained with its block."""
    metadata = {
        **YARN,
        "llama.context_length": 32768,
        "llama.rope.scaling.finetuned": is_finetuned,
    }
    path = llama_with(tmp_path / "m.gguf", {}, Written(metadata=metadata))
    native = read_model_config(str(path)).native()
    assert (native.added_block is None) == is_finetuned
    assert native.native_len == (131072 if is_finetuned else 32768)
