"""Blocks are read in every spelling; unusable fields are refused by name."""

from typing import Any

import pytest

from ropewalk.rope import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    RopeConfigError,
    Rotary,
    Unscaled,
    Yarn,
    native_rope,
)
from ropewalk.rope.from_config import parse_method

ROTARY = Rotary(16, 10_000.0)
CONFIG = {"max_position_embeddings": 4096, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("block", "field", "message"),
    [
        ({"rope_type": "magic"}, "rope_type", "must be one of default, linear"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, "rope_type", "type 'yarn'"),
        ({"rope_type": "linear"}, "factor", "is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor", ">= 1, got 0.5"),
        ({"rope_type": "linear", "factor": True}, "factor", "finite number, got True"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor", "finite number, got nan"),
        ({"rope_type": "yarn", "factor": 4, "attn_factor": 1}, "attn_factor", "is not a field"),
        ({"rope_type": "linear", "factor": 4, "beta_fast": 32}, "beta_fast", "is not a field"),
        (
            {"rope_type": "yarn", "factor": 4, "attention_factor": 0},
            "attention_factor",
            "must be > 0, got 0",
        ),
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
        ({"rope_type": "proportional"}, "rope_type", "is no scaling; leave rope_type out"),
        ({"mrope_section": [1, 2]}, "mrope_section", r"add up to the 8 pairs.*got \[1, 2\]"),
        ({"mrope_section": 8}, "mrope_section", "must be a list of numbers of pairs, got 8"),
        ({"mrope_interleaved": 1}, "mrope_interleaved", "must be true or false, got 1"),
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


@pytest.mark.parametrize(
    ("max_len", "stated", "native_len"),
    [
        (4096, {}, 16_384),  # Vicuna 16k, whose config gives the length before the block
        (16_384, {"original_max_position_embeddings": 4096}, 16_384),
        (4096, {"original_max_position_embeddings": 4096}, 16_384),
    ],
)
def test_a_linear_block_reaches_its_factor_times_the_length(
    max_len: int, stated: dict[str, int], native_len: int
) -> None:
    """As in vLLM, and as in SGLang, which reads a stated length."""
    block = {"type": "linear", "factor": 4.0, **stated}
    native = native_rope(
        {**CONFIG, "max_position_embeddings": max_len, "rope_scaling": block},
    )
    assert native.native_len == native_len
    assert native.method.scaling == Linear(factor=4.0)
    assert native.method.native_len == 4096


def test_a_linear_block_of_some_layers_is_within_the_length() -> None:
    """Gemma 3 gives 131,072, which its block of factor 8 has reached already."""
    blocks = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {**CONFIG, "max_position_embeddings": 131_072, "rope_parameters": blocks}
    assert native_rope(config).native_len == 131_072


def test_the_older_name_of_a_type_may_stand_beside_the_newer() -> None:
    """transformers writes both, for example when it saves Qwen 2.5 VL."""
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
    plain = native_rope({**CONFIG, "rope_scaling": {"rope_type": "longrope", **lists}})
    block = {"type": "su", "rope_type": "longrope", **lists}
    assert native_rope({**CONFIG, "rope_scaling": block}).method == plain.method
    for older, newer in (("su", "default"), ("mrope", "yarn"), ("default", "linear"), (3, "yarn")):
        with pytest.raises(RopeConfigError, match=f"says '{newer}', type {older!r}"):
            native_rope({**CONFIG, "rope_scaling": {"type": older, "rope_type": newer}})


def test_a_type_that_transformers_cannot_load_is_refused() -> None:
    """The load of such a checkpoint ends in a KeyError."""
    with pytest.raises(RopeConfigError, match="'ntk' is for deployments"):
        native_rope({**CONFIG, "rope_scaling": {"type": "ntk", "factor": 4.0}})


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


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
        {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    ],
)
def test_sections_of_positions_are_the_plain_rotation_for_text(block: dict[str, Any]) -> None:
    """Qwen2-VL and Qwen 3.5 number a text's tokens alike in time, height and width."""
    assert native_rope({**CONFIG, "rope_parameters": block}) == native_rope(CONFIG)


def test_sections_may_stand_beside_a_scaling() -> None:
    """Qwen 3.5's model card has this block for contexts above 262,144 tokens."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    assert native_rope({**CONFIG, "rope_parameters": {**block, **sections}}) == native_rope(
        {**CONFIG, "rope_parameters": block}
    )


def test_a_block_may_describe_its_model() -> None:
    """Ministral 3 repeats its longest context, and states its temperature by position."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    more = {"max_position_embeddings": 4096, "llama_4_scaling_beta": 0.1}
    plain = native_rope({**CONFIG, "rope_parameters": block})
    assert native_rope({**CONFIG, "rope_parameters": {**block, **more}}) == plain
    absent = dict.fromkeys(more)  # a null is an absent value
    assert native_rope({**CONFIG, "rope_parameters": {**block, **absent}}) == plain
    for field, value, message in (
        ("max_position_embeddings", 8192, "is 4096 beside the block, and 8192 in it"),
        ("llama_4_scaling_beta", "0.1", "must be a number, got '0.1'"),
    ):
        with pytest.raises(RopeConfigError, match=message) as caught:
            native_rope({**CONFIG, "rope_parameters": {**block, **more, field: value}})
        assert caught.value.field == field
    with pytest.raises(RopeConfigError, match="is not a field of rope_type 'yarn'"):
        parse_method({**block, "llama_4_scaling_beta": 0.1}, ROTARY, 4096)


def test_layers_may_state_heads_of_their_own() -> None:
    """Gemma 4's full-attention layers have wider heads than the others."""
    config = {
        **CONFIG,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "per_layer_config": {"1": {"head_dim": 64}},
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    native = native_rope(config)
    assert native.rotary == Rotary(64, 1e6, num_turning=8)
    assert native.tables["sliding_attention"].rotary == Rotary(32, 1e4)
    assert not native.carries_scaling
    mixed = {**config, "per_layer_config": {"0": {"head_dim": 64}}}
    with pytest.raises(RopeConfigError, match=r"sliding_attention layers heads of \[32, 64\]"):
        native_rope(mixed)


@pytest.mark.parametrize(("share", "turning"), [(0.05, 0), (1.5, 12)])
def test_a_proportion_that_no_table_has_is_refused(share: float, turning: int) -> None:
    """One pair alone has no slowest frequency to stretch, and there are only eight."""
    block = {"rope_type": "proportional", "partial_rotary_factor": share}
    with pytest.raises(RopeConfigError, match=f"rotates {turning} of 8 pairs") as caught:
        native_rope({**CONFIG, "rope_parameters": block})
    assert caught.value.field == "partial_rotary_factor"


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
        ({"sliding_attention": {}, "full_attention": None}, "rope_parameters"),
    ],
)
def test_nested_blocks_that_would_be_misread_are_refused(
    blocks: dict[str, Any], field: str
) -> None:
    """Transformers ignores such fields silently."""
    with pytest.raises(RopeConfigError) as caught:
        native_rope({**CONFIG, "rope_parameters": blocks})
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["rope_theta", "partial_rotary_factor"])
@pytest.mark.parametrize("value", ["half", 0, -1.0, True, [1]])
def test_a_base_or_share_that_is_no_positive_number_is_refused(field: str, value: Any) -> None:
    """In the block and beside it; null means that the default counts."""
    for config in (
        {**CONFIG, "rope_parameters": {"rope_type": "default", field: value}},
        {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": None}, field: value},
    ):
        with pytest.raises(RopeConfigError, match="must be a finite number > 0, got ") as caught:
            native_rope(config)
        assert caught.value.field == field
    native_rope({**CONFIG, "rope_parameters": {"rope_type": "default", field: None}})
