"""The choice of a tier for a request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.rope import (
    DynamicNTK,
    Linear,
    LongRope,
    Profile,
    RopeConfigError,
    Tier,
    Unscaled,
    Yarn,
    choose_tier,
    native_rope,
)
from ropewalk.rope.from_config import parse_method
from ropewalk.rope.tiers import build_tiers, default_multiples

NATIVE = native_rope({"max_position_embeddings": 256, "head_dim": 16})


def tiers_of(block: dict[str, Any], multiples: list[float] | None = None) -> tuple[Tier, ...]:
    """The tiers of a deployment over the plain checkpoint."""
    return build_tiers(parse_method(block, NATIVE.rotary, 256), NATIVE, multiples)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.0, (1,)), (1.5, (1, 1.5)), (4.0, (1, 2, 4)), (6.0, (1, 2, 4, 6)), (8.0, (1, 2, 4, 8))],
)
def test_default_tiers_are_powers_of_two_up_to_the_factor(
    factor: float, expected: tuple[float, ...]
) -> None:
    """The last tier is the factor itself."""
    assert default_multiples(factor) == expected


@pytest.mark.parametrize("rope_type", ["linear", "ntk", "dynamic", "yarn", "llama3"])
def test_the_first_tier_is_the_native_table(rope_type: str) -> None:
    """With any method, a request within L is served like the untouched model."""
    tiers = tiers_of({"rope_type": rope_type, "factor": 4.0})
    assert [tier.ceiling for tier in tiers] == [256, 512, 1024]
    assert tiers[0].profile == Profile(Unscaled())
    assert all(tier.profile != tiers[0].profile for tier in tiers[1:])


def test_a_tier_sets_the_factor_and_the_table() -> None:
    """The factor becomes ceiling / L; `dynamic` gets the sequence length instead."""
    assert tiers_of({"rope_type": "linear", "factor": 4.0})[1].profile.scaling == Linear(factor=2.0)
    yarn = tiers_of({"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0})[1].profile.scaling
    assert yarn == Yarn(factor=2.0, original_max_position_embeddings=256, beta_fast=8.0)
    dynamic = tiers_of({"rope_type": "dynamic", "factor": 3.0}, [1, 2, 4])[2].profile.scaling
    assert dynamic == DynamicNTK(factor=3.0, original_max_position_embeddings=256, num_tokens=1024)


def test_longrope_has_two_tiers() -> None:
    """The long list is the same at every length above L."""
    block = {
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    tiers = tiers_of(block)
    assert [tier.ceiling for tier in tiers] == [256, 2048]
    scaling = tiers[1].profile.scaling
    assert isinstance(scaling, LongRope)
    assert scaling.frequencies(NATIVE.rotary).inv_freq_P[0] == 0.25


def test_logn_is_part_of_the_profile_above_the_first_tier() -> None:
    """Below L, log-n multiplies by one."""
    tiers = tiers_of({"rope_type": "yarn", "factor": 2.0, "use_logn_attn": True})
    assert [tier.profile.logn_len for tier in tiers] == [None, 256]


@pytest.mark.parametrize("multiples", [[], [2, 4], [1, 4, 2], [1, 2, 2]])
def test_tier_lists_must_rise_from_one(multiples: list[float]) -> None:
    """Tier lists that do not rise from one are refused."""
    with pytest.raises(RopeConfigError, match="must rise strictly from 1"):
        tiers_of({"rope_type": "yarn", "factor": 4.0}, multiples)


@pytest.mark.parametrize(
    ("so_far", "covered", "at_least", "ceiling"),
    [
        (256, 256, 1.0, 256),
        (257, 257, 1.0, 512),
        (10, 1024, 1.0, 256),
        (257, 1024, 1.0, 512),
        (10, 1025, 1.0, None),
        (10, 10, 2.5, 1024),
    ],
)
def test_choice(so_far: int, covered: int, at_least: float, ceiling: int | None) -> None:
    """The choice is the smallest tier that covers the tokens so far, whatever is to come."""
    tiers = tiers_of({"rope_type": "yarn", "factor": 4.0})
    tier = choose_tier(tiers, so_far, covered, at_least)
    assert (tier.ceiling if tier else None) == ceiling


@given(
    covered=st.integers(1, 5000),
    so_far=st.integers(1, 5000),
    at_least=st.floats(1, 9),
)
def test_a_chosen_tier_always_covers(covered: int, so_far: int, at_least: float) -> None:
    """No tier smaller than the chosen one covers the length."""
    tiers = tiers_of({"rope_type": "yarn", "factor": 8.0})
    so_far = min(so_far, covered)
    tier = choose_tier(tiers, so_far, covered, at_least)
    fitting = [each for each in tiers if each.ceiling >= so_far and each.factor >= at_least]
    assert tier == (fitting[0] if fitting and covered <= 2048 else None)
