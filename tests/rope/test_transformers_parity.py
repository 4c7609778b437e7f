"""Every table equals transformers' to the bit, over a grid."""

import itertools
import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ropewalk.rope import Rotary, native_rope
from ropewalk.rope.from_config import parse_method

# Width of a head, the share that rotates, and theta.
ROTARIES = [
    (32, 1.0, 1e4), (64, 0.25, 5e5), (80, 0.4, 150_000.0), (96, 0.5, 1e6), (128, 1.0, 5e5),
    (128, 0.75, 1e4), (256, 1.0, 1e7),
]  # fmt: skip
LENGTHS = [256, 2048, 4096, 32_768, 131_072]
FACTORS = [1.0, 1.5, 2.0, 3.7, 4.0, 8.0, 32.0, 40.5, 64.0]
YARN_OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta_fast": 8.0},
    {"beta_fast": 64.0, "beta_slow": 2.5},
    {"beta_slow": 32.0},
    {"attention_factor": 1.25},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 1.3},
    {"mscale": 1.5},
    {"truncate": False},
    {"truncate": False, "beta_fast": 16.0, "attention_factor": 0.25},
]
LLAMA3_OPTIONS = [
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"low_freq_factor": 0.5, "high_freq_factor": 32.0},
    {"low_freq_factor": 2.0, "high_freq_factor": 2.5},
]


def reference(
    block: dict[str, Any], head_dim: int, share: float, native_len: int, seq_len: int | None
) -> tuple[torch.Tensor, float]:
    """The table that transformers computes for a config of its own."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=native_len,
        rope_parameters={**block, "partial_rotary_factor": share},
    )
    table = ROPE_INIT_FUNCTIONS[block["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)
    return table[0], table[1]


def assert_equal_tables(
    block: dict[str, Any], head_dim: int, share: float, native_len: int, seq_len: int | None = None
) -> None:
    """Compare the bits of the frequencies and the exact attention factor."""
    expected_P, expected_factor = reference(dict(block), head_dim, share, native_len, seq_len)
    rotary = Rotary(int(head_dim * share), block["rope_theta"])
    method = parse_method(block, rotary, native_len)
    scaling = method.scaling
    if seq_len is not None:
        scaling = scaling.at(seq_len, native_len)
    table = scaling.frequencies(rotary)

    assert torch.equal(expected_P, table.inv_freq_P), block
    assert expected_factor == table.attention_factor, block


@pytest.mark.parametrize(("head_dim", "share", "theta"), ROTARIES)
def test_linear_equals_the_reference(head_dim: int, share: float, theta: float) -> None:
    """The grid covers every factor and width."""
    for factor in FACTORS:
        block = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        assert_equal_tables(block, head_dim, share, 4096)


@pytest.mark.parametrize(("head_dim", "share", "theta"), ROTARIES)
def test_yarn_equals_the_reference(head_dim: int, share: float, theta: float) -> None:
    """The grid is lengths x factors x yarn's own options."""
    for native_len, factor, options in itertools.product(LENGTHS, FACTORS, YARN_OPTIONS):
        block = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": native_len,
            **options,
        }
        assert_equal_tables(block, head_dim, share, native_len)


@pytest.mark.parametrize(("head_dim", "share", "theta"), ROTARIES)
def test_llama3_equals_the_reference(head_dim: int, share: float, theta: float) -> None:
    """The grid is lengths x factors x llama3's own options."""
    for native_len, factor, options in itertools.product(LENGTHS, FACTORS, LLAMA3_OPTIONS):
        block = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": native_len,
            **options,
        }
        assert_equal_tables(block, head_dim, share, native_len)


@pytest.mark.parametrize(("head_dim", "share", "theta"), ROTARIES)
def test_dynamic_equals_the_reference_at_the_ceiling(
    head_dim: int, share: float, theta: float
) -> None:
    """The grid is lengths x factors x sequence lengths, each computed anew."""
    for native_len, factor, multiple in itertools.product(LENGTHS, FACTORS, [1, 1.5, 2, 4, 8, 64]):
        block = {"rope_type": "dynamic", "rope_theta": theta, "factor": factor}
        assert_equal_tables(block, head_dim, share, native_len, round(native_len * multiple))


@pytest.mark.parametrize(("head_dim", "share", "theta"), ROTARIES)
def test_longrope_equals_the_reference_on_both_sides_of_its_switch(
    head_dim: int, share: float, theta: float
) -> None:
    """The short list holds up to L, the long one from L + 1."""
    rng = random.Random(head_dim * theta)
    pairs = int(head_dim * share) // 2
    for native_len, factor in itertools.product(LENGTHS, FACTORS):
        block = {
            "rope_type": "longrope",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": native_len,
            "short_factor": [rng.uniform(1, 3) for _ in range(pairs)],
            "long_factor": [rng.uniform(1, 64) for _ in range(pairs)],
            **rng.choice([{}, {"attention_factor": 1.19}]),
        }
        for seq_len in (native_len - 1, native_len, native_len + 1, 3 * native_len):
            assert_equal_tables(block, head_dim, share, native_len, seq_len)


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_default_equals_the_module_of_a_model(head_dim: int, theta: float) -> None:
    """The reference is the table in a Llama's rotary module."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    table = parse_method({}, Rotary(head_dim, theta), 4096).scaling.frequencies(
        Rotary(head_dim, theta)
    )

    assert torch.equal(LlamaRotaryEmbedding(config).inv_freq, table.inv_freq_P)
    assert table.attention_factor == 1.0


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("head_dim", [32, 80, 256, 512])
def test_proportional_equals_the_reference(head_dim: int, theta: float) -> None:
    """The first pairs have the frequencies of the whole head, and the rest stand still."""
    for share, factor in itertools.product((0.25, 0.3, 0.5, 1.0), (None, 1.0, 4.0, 40.5)):
        block = {"rope_type": "proportional", "rope_theta": theta}
        block |= {} if factor is None else {"factor": factor}
        expected_P, expected_factor = reference(block, head_dim, share, 4096, None)
        config = {
            "max_position_embeddings": 4096,
            "head_dim": head_dim,
            "rope_parameters": {**block, "partial_rotary_factor": share},
        }
        native = native_rope(config)
        table = native.tables["all"].frequencies()
        assert torch.equal(expected_P, table.inv_freq_P), (share, factor)
        assert expected_factor == table.attention_factor
        assert int((table.inv_freq_P > 0).sum()) == native.rotary.num_rotating
