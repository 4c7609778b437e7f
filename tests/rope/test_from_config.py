"""Blocks are read in every spelling; unusable fields are refused by name."""

from typing import Any

import pytest

from rope import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    RopeConfigError,
    Rotary,
    Unscaled,
    Yarn,
    native_rope,
    parse_method,
)

ROTARY = Rotary(16, 10_000.0)
CONFIG = {"max_position_embeddings": 4096, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("block", "field", "message"),
    [
        ({"rope_type": "magic"}, "rope_type", "must be one of default, linear"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, "rope_type", "type 'yarn'"),
        ({"rope_type": "linear"}, "factor", "is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor", ">= 1, got 0.5"),
        ({"rope_type": "linear", "factor": "4"}, "factor", "finite number, got '4'"),
        ({"rope_type": "linear", "factor": True}, "factor", "finite number, got True"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor", "finite number, got nan"),
        ({"rope_type": "yarn", "factor": 4, "attn_factor": 1}, "attn_factor", "is not a field"),
        ({"rope_type": "linear", "factor": 4, "beta_fast": 32}, "beta_fast", "is not a field"),
        (
            {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2},
            "beta_fast",
            "must be >= beta_slow",
        ),
        (
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": "32k"},
            "original_max_position_embeddings",
            "integer >= 1, got '32k'",
        ),
        ({"rope_type": "yarn", "factor": 4, "truncate": 1}, "truncate", "true or false"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor",
            "must be > low_freq_factor",
        ),
        (
            {"rope_type": "longrope", "factor": 4, "short_factor": [1.0] * 8},
            "long_factor",
            "must be a list of 8 numbers",
        ),
        (
            {
                "rope_type": "longrope",
                "factor": 4,
                "short_factor": [1.0] * 7,
                "long_factor": [1.0] * 8,
            },
            "short_factor",
            "must have 8 numbers, one a pair; got 7",
        ),
        ({"rope_type": "proportional"}, "rope_type", "not supported yet"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section", "not supported yet"),
        (
            {"rope_type": "yarn", "factor": 4, "rope_theta": 5e5},
            "rope_theta",
            "use rope_type 'ntk'",
        ),
    ],
)
def test_refusals_name_field_limit_and_value(
    block: dict[str, Any], field: str, message: str
) -> None:
    """The reader of rope blocks ignores no field."""
    with pytest.raises(RopeConfigError, match=message) as caught:
        parse_method(block, ROTARY, 4096)
    assert caught.value.field == field


def test_the_old_spelling_of_the_type_is_read() -> None:
    """Configs of transformers v4 have `type`."""
    assert parse_method({"type": "linear", "factor": 2}, ROTARY, 4096).scaling == Linear(factor=2.0)


def test_a_block_may_state_the_trained_length() -> None:
    """The stated length becomes L."""
    block = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}
    method = parse_method(block, ROTARY, 4096)
    assert method.native_len == 1024
    assert method.scaling == Yarn(factor=4.0, original_max_position_embeddings=1024)


def test_logn_is_a_switch_on_any_method() -> None:
    """The name of the switch is Qwen-1's."""
    block = {"rope_type": "dynamic", "factor": 2, "use_logn_attn": True}
    method = parse_method(block, ROTARY, 4096)
    assert method.use_logn_attn
    assert isinstance(method.scaling, DynamicNTK)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {
                "chunk_size": 262_144,
                "local_size": 8192,
                "original_max_position_embeddings": 262_144,
            },
            r"not served yet; the checkpoint was trained for 262144 tokens and reaches its "
            r"max_position_embeddings \(1010000\) only with that method",
        ),
        ({}, r"not served yet; it reaches its max_position_embeddings \(1010000\)"),
        ([1], r"not served yet; it reaches its max_position_embeddings \(1010000\)"),
    ],
)
def test_dual_chunk_attention_is_refused_with_its_trained_length(block: Any, message: str) -> None:
    """Qwen2.5-7B-Instruct-1M declares 1,010,000 tokens, and 262,144 of them were trained."""
    config = {
        **CONFIG,
        "max_position_embeddings": 1_010_000,
        "dual_chunk_attention_config": block,
    }
    with pytest.raises(RopeConfigError, match=message) as caught:
        native_rope(config)
    assert caught.value.field == "dual_chunk_attention_config"
    native = native_rope({**config, "dual_chunk_attention_config": None})
    assert native.native_len == 1_010_000


def test_v4_and_v5_configs_read_alike() -> None:
    """Version 4 has rope_scaling beside rope_theta, and version 5 has rope_parameters."""
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    v4 = {**CONFIG, "rope_theta": 1e6, "rope_scaling": block}
    v5 = {**CONFIG, "rope_parameters": {**block, "rope_type": "yarn", "rope_theta": 1e6}}
    assert native_rope(v4) == native_rope(v5)
    assert native_rope(v4).rotary == Rotary(16, 1e6)


def test_native_length_of_a_plain_checkpoint() -> None:
    """The length is max_position_embeddings."""
    native = native_rope(CONFIG)
    assert native.native_len == 4096
    assert not native.carries_scaling


def test_native_length_of_a_scaled_checkpoint_is_the_larger_of_the_two() -> None:
    """Llama 3.1 declares 131,072, though 8,192 x 8 is only 65,536."""
    block = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    native = native_rope({**CONFIG, "max_position_embeddings": 131_072, "rope_scaling": block})
    assert native.native_len == 131_072
    assert isinstance(native.method.scaling, Llama3)
    native = native_rope({**CONFIG, "max_position_embeddings": 8192, "rope_scaling": block})
    assert native.native_len == 65_536


def test_a_length_that_transformers_does_not_read_changes_nothing() -> None:
    """The dynamic type of transformers uses max_position_embeddings alone."""
    block = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}
    native = native_rope({**CONFIG, "rope_scaling": block})
    assert native.method.native_len == native.native_len == 4096


def test_phi3_keeps_its_trained_length_beside_the_block() -> None:
    """The factor is derived from that length."""
    block = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    native = native_rope(
        {
            **CONFIG,
            "max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": block,
        }
    )
    assert isinstance(native.method.scaling, LongRope)
    assert native.method.native_len == 4096
    assert native.method.factor == 32.0
    assert native.native_len == 131_072


def test_tables_per_layer_type() -> None:
    """Gemma 3's full-attention layers are the ones that deployments scale."""
    blocks = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    native = native_rope({**CONFIG, "head_dim": 32, "rope_parameters": blocks})
    assert native.scaled_layer_type == "full_attention"
    assert native.rotary == Rotary(32, 1e6)
    assert native.tables["sliding_attention"].scaling == Unscaled()
    assert native.native_len == 4096


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        (
            {
                "full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False},
                "sliding_attention": {},
            },
            "truncate",
        ),
        ({"full_attention": {}, "sliding_attention": {}, "factor": 4.0}, "factor"),
        ({"chunked_attention": {}, "sliding_attention": {}}, "rope_parameters"),
    ],
)
def test_nested_blocks_that_would_be_misread_are_refused(
    blocks: dict[str, Any], field: str
) -> None:
    """Transformers ignores such fields silently."""
    with pytest.raises(RopeConfigError) as caught:
        native_rope({**CONFIG, "rope_parameters": blocks})
    assert caught.value.field == field
