"""The length of an answer without max_tokens, and the tier that it starts on."""

import itertools
from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.rope import native_rope

NATIVE = native_rope({"max_position_embeddings": 256, "head_dim": 16})


def deployment(**options: Any) -> Deployment:
    """A deployment with L = 256, by default with tiers up to 8 L."""
    tiers = None if "rope_scaling" in options else [1, 2, 4, 8]
    return make_deployment("m", NATIVE, DeploymentOptions(**{"rope_tiers": tiers, **options}))


def end_of(served: Deployment, num_prompt_tokens: int, **asked: Any) -> int:
    """The positions of a request without max_tokens."""
    return num_prompt_tokens + served.place_open(RopeRequest(**asked), num_prompt_tokens)[0] - 1


@pytest.mark.parametrize(
    ("num_prompt_tokens", "end"),
    [(1, 256), (170, 256), (171, 512), (223, 512), (238, 512), (341, 512), (342, 1024)],
)
def test_a_tier_must_leave_a_quarter_of_what_the_next_would(
    num_prompt_tokens: int, end: int
) -> None:
    """An answer used to get 34 tokens at a prompt of 223, and 275 at one of 238."""
    assert end_of(deployment(), num_prompt_tokens) == end


def test_an_answer_never_falls_below_the_reserve_or_a_quarter() -> None:
    """The two bounds hold for every prompt that a higher tier could serve."""
    served = deployment()
    ends = [tier.ceiling for tier in served.own_tiers]
    for num_prompt_tokens in range(1, 1024):
        end = end_of(served, num_prompt_tokens)
        assert end - num_prompt_tokens >= 32
        higher = next(each for each in ends if each > end) if end < 2048 else end
        assert (end - num_prompt_tokens) * 4 >= higher - num_prompt_tokens


def test_a_number_of_the_operator_is_obeyed_as_it_is() -> None:
    """A setting of L / 8 keeps prompts on the native table as long as that leaves so much."""
    served = deployment(answer_reserve_tokens=32)
    assert [end_of(served, each) for each in (223, 224, 225)] == [256, 256, 512]
    for num_prompt_tokens in range(1, 2016):
        assert end_of(served, num_prompt_tokens) - num_prompt_tokens >= 32


def test_tiers_that_are_far_apart_do_not_draw_short_prompts_away() -> None:
    """Two thirds of a tier stay on it, however much the next tier would leave."""
    served = deployment(rope_tiers=[1, 64])
    assert [end_of(served, each) for each in (10, 170, 171)] == [256, 256, 16384]


def test_max_model_len_and_the_cache_end_the_last_tier() -> None:
    """The end of the longest tier is the advertised length, if that is shorter."""
    for served in (deployment(max_model_len=300), deployment().within_cache(300)):
        assert [end_of(served, each) for each in (223, 240, 250, 300)] == [256, 300, 300, 300]


def test_other_policies_and_factors_keep_their_ends() -> None:
    """The reserve chooses a tier under `pinned` only, from the factor asked for."""
    for policy in ("fixed", "grow", "grow-exact", "by_position"):
        assert end_of(deployment(), 10, policy=policy) == 2048
    assert end_of(deployment(), 10, factor=3) == 1024
    assert end_of(deployment(), 10, policy="fixed", factor=3) == 1024


def test_the_tier_placed_is_the_tier_chosen() -> None:
    """A request gets the tier whose end its answer may reach."""
    served = deployment()
    for num_prompt_tokens, factor in itertools.product((1, 171, 223, 400, 2048), (None, 2.0)):
        asked = RopeRequest(factor=factor)
        max_tokens, placed = served.place_open(asked, num_prompt_tokens)
        assert placed == served.place(asked, num_prompt_tokens, max_tokens)
        assert placed.tier.ceiling == num_prompt_tokens + max_tokens - 1
