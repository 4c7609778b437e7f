"""The tiers of requests, and the rope fields that a request may set."""

from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.errors import ContextLengthError, RequestError
from ropewalk.rope import (
    POLICIES,
    DynamicNTK,
    Linear,
    Policy,
    RopeConfigError,
    Unscaled,
    Yarn,
    native_rope,
)

CONFIG = {"max_position_embeddings": 256, "head_dim": 16}
PLAIN = native_rope(CONFIG)
YARN_4 = {"rope_type": "yarn", "factor": 4.0}
YARN_BLOCK = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = native_rope({**CONFIG, "rope_scaling": YARN_BLOCK})
LONGROPE = native_rope(
    {
        **CONFIG,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
        },
    }
)


def plain(**options: Any) -> Deployment:
    """A deployment of a checkpoint without scaling."""
    return make_deployment("m", PLAIN, DeploymentOptions(**options))


def scaled(**options: Any) -> Deployment:
    """A deployment of a checkpoint that carries yarn."""
    return make_deployment("m", SCALED, DeploymentOptions(**options))


def test_the_default_is_yarn_by_position_on_one_two_four() -> None:
    """The default changes nothing up to L and scales above it."""
    deployment = plain()
    assert (deployment.rope_type, deployment.policy) == ("yarn", "by_position")
    assert [tier.factor for tier in deployment.own_tiers] == [1, 2, 4]
    assert deployment.max_len == 1024


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "fixed"])
def test_max_tokens_bounds_a_request_and_chooses_nothing(policy: Policy) -> None:
    """All but the last token take a position: prompt + max(0, max_tokens - 1)."""
    deployment = plain(rope_policy=policy)
    placed = {deployment.choose(RopeRequest(), 250, each) for each in (0, 1, 7, 8, 775)}
    assert [each.tier.factor for each in placed] == [1]
    assert deployment.choose(RopeRequest(), 257, 0).tier.factor == 2
    assert deployment.choose(RopeRequest(), 1024, 1).tier.factor == 4
    with pytest.raises(ContextLengthError, match="max_tokens may be at most 775"):
        deployment.choose(RopeRequest(), 250, 776)


def test_a_growing_request_is_on_the_lowest_tier_that_covers_its_tokens() -> None:
    placed = plain(rope_policy="grow").choose(RopeRequest(), 100, 700)
    covering = [placed.tier_covering(each).factor for each in (1, 256, 257, 512, 513, 799)]
    assert covering == [1, 1, 2, 2, 4, 4]


def test_a_requested_factor_is_raised_to_the_next_tier() -> None:
    """Raised factors keep the tables few; the request gets back both factors."""
    placed = plain().choose(RopeRequest(factor=2.5), 3, 2)
    assert (placed.tier.factor, placed.requested_factor) == (4.0, 2.5)
    placed = plain().choose(RopeRequest(factor=2.0), 600, 2)
    assert placed.tier.factor == 4.0
    with pytest.raises(ContextLengthError):
        plain().choose(RopeRequest(factor=2.0, policy="fixed"), 600, 2)


def test_default_extrapolates_because_it_was_asked_for() -> None:
    """The rope type `default` is served up to the deployment's longest length."""
    placed = plain().choose(RopeRequest(rope_type="default"), 1000, 2)
    assert (placed.tier.profile.scaling.rope_type, placed.tier.profile.scaling) == (
        "default",
        Unscaled(),
    )
    with pytest.raises(ContextLengthError):
        plain().choose(RopeRequest(rope_type="default"), 1025, 2)


def test_other_methods_have_the_same_ceilings() -> None:
    """Each method keeps its own default parameters."""
    placed = plain().choose(RopeRequest(rope_type="dynamic"), 300, 2)
    assert placed.tier.profile.scaling == DynamicNTK(
        factor=1.0, original_max_position_embeddings=256, num_tokens=512
    )


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        (RopeRequest(rope_type="magic"), "rope.rope_type", "must be one of default, dynamic"),
        (RopeRequest(rope_type="longrope"), "rope.rope_type", "must be one of"),
        (RopeRequest(factor=4.5), "rope.factor", "between 1 and 4. Given: 4.5"),
        (
            RopeRequest(rope_type="default", factor=2.0),
            "rope.factor",
            "must be 1 under `rope_type` default. Given: 2",
        ),
        (RopeRequest(policy="shrink"), "rope.policy", "grow-exact, fixed. Given: shrink"),
    ],
)
def test_a_rope_object_that_is_not_allowed_is_refused_by_field(
    asked: RopeRequest, param: str, message: str
) -> None:
    """The error of a refused field states the limit and the value."""
    with pytest.raises(RequestError, match=message) as caught:
        plain().choose(asked, 3, 2)
    assert caught.value.param == param


def test_the_operator_narrows_what_may_be_asked() -> None:
    """The operator limits the rope types and the factor."""
    deployment = plain(allowed_rope_types=["yarn", "linear"], max_rope_factor=2.0)
    assert deployment.rope_types == ["linear", "yarn"]
    with pytest.raises(RequestError, match="between 1 and 2"):
        deployment.choose(RopeRequest(factor=4.0), 3, 2)
    assert deployment.choose(RopeRequest(), 1000, 2).tier.factor == 4.0


@pytest.mark.parametrize("policy", ["fixed", "grow"])
def test_a_factor_that_an_answer_reports_may_be_sent_back(policy: Any) -> None:
    """A request may name the factor that it has anyway, also above max_rope_factor."""
    deployment = plain(rope_policy=policy, rope_scaling=YARN_4, max_rope_factor=2.0)
    reported = deployment.choose(RopeRequest(), 600, 100).tier
    assert reported.factor == 4
    asked = RopeRequest("yarn", 4.0, policy, 256)
    assert deployment.choose(asked, 600, 100).tier == reported
    assert deployment.choose_open(asked, 600)[1].tier == reported
    if policy == "grow":
        with pytest.raises(RequestError, match=r"between 1 and 2\. Given: 4"):
            deployment.choose(asked, 500, 10)
    else:
        with pytest.raises(RequestError, match=r"between 1 and 2\. Given: 3"):
            deployment.choose(RopeRequest(factor=3.0), 500, 10)
    with pytest.raises(RequestError, match=r"only reported, and must be 256\. Given: 64"):
        deployment.choose(RopeRequest(original_len=64), 3, 2)


def test_max_model_len_ends_the_last_tier_early() -> None:
    """The setting max_model_len cannot lengthen a tier."""
    deployment = plain(max_model_len=700)
    assert deployment.choose(RopeRequest(), 700, 1).tier.factor == 4.0
    with pytest.raises(ContextLengthError, match="maximum context length is 700"):
        deployment.choose(RopeRequest(), 701, 1)
    with pytest.raises(RopeConfigError, match="must be <= the longest tier"):
        plain(max_model_len=1025)


def test_tiers_may_be_listed() -> None:
    """The largest listed tier is the factor, if no factor is stated."""
    deployment = plain(rope_tiers=[1, 3, 12])
    assert [tier.ceiling for tier in deployment.own_tiers] == [256, 768, 3072]
    with pytest.raises(RopeConfigError, match="no meaning under rope_policy fixed"):
        plain(rope_tiers=[1, 2], rope_policy="fixed")


def test_tiers_and_a_factor_must_agree() -> None:
    """A factor that differs would go unused; `dynamic` uses its factor in the formula."""
    block = YARN_4
    assert plain(rope_scaling=block, rope_tiers=[1, 3, 4]).max_len == 1024
    for last, given in ((3, "3"), (8.5, "8.5")):
        message = f"^rope_tiers: ends at {given}, but the factor of rope_scaling is 4: "
        with pytest.raises(RopeConfigError, match=message):
            plain(rope_scaling=block, rope_tiers=[1, last])
    dynamic = plain(rope_scaling={"rope_type": "dynamic", "factor": 1.0}, rope_tiers=[1, 4])
    assert dynamic.own_tiers[-1].profile.scaling == DynamicNTK(
        factor=1.0, original_max_position_embeddings=256, num_tokens=1024
    )
    for options in ({}, {"rope_scaling": {"rope_type": "yarn"}}):
        with pytest.raises(RopeConfigError, match=r"^rope_tiers: the largest must be <= 65536"):
            plain(rope_tiers=[1, 70_000], **options)


def test_trained_in_scaling_is_served_natively_and_fixed() -> None:
    """All lengths of a scaled checkpoint use one table, and requests cannot change it."""
    deployment = scaled()
    placed = deployment.choose(RopeRequest(), 3, 2)
    assert (placed.tier.profile.scaling.rope_type, placed.tier.factor, placed.policy) == (
        "yarn",
        4.0,
        "fixed",
    )
    assert placed.tier.profile.scaling == Yarn(factor=4.0, original_max_position_embeddings=64)
    assert deployment.max_len == 256
    with pytest.raises(RequestError, match=r"rope\.policy"):
        deployment.choose(RopeRequest(policy="grow"), 3, 2)


def test_only_a_fixed_override_goes_on_top_of_trained_in_scaling() -> None:
    """The override replaces the checkpoint's block, as in transformers."""
    block = {**YARN_BLOCK, "factor": 8.0}
    deployment = scaled(rope_scaling=block, rope_policy="fixed")
    placed = deployment.choose(RopeRequest(), 3, 2)
    assert placed.tier.profile.scaling == Yarn(factor=8.0, original_max_position_embeddings=64)
    assert deployment.max_len == 512
    assert scaled(rope_scaling=block).tiers == deployment.tiers


def test_an_override_may_undo_trained_in_scaling() -> None:
    """The rope type `default` then means the plain table, not the checkpoint's."""
    deployment = scaled(rope_scaling={"rope_type": "default"}, rope_policy="fixed")
    assert deployment.choose(RopeRequest(), 3, 2).tier.profile.scaling == Unscaled()
    with pytest.raises(RopeConfigError, match="must be stated to replace"):
        scaled(rope_scaling={"rope_type": "linear", "factor": 2}, rope_policy="fixed")


def test_a_scaled_checkpoint_tells_the_numbers_of_its_own_block() -> None:
    """The served length is the factor times the original length."""
    deployment = scaled()
    placed = deployment.choose(RopeRequest(rope_type="default"), 3, 2)
    assert placed.tier.profile == deployment.choose(RopeRequest(), 3, 2).tier.profile
    assert (placed.original_len, placed.tier.factor, deployment.native_len) == (64, 4.0, 256)
    with pytest.raises(ContextLengthError, match="A rope factor of 5 "):
        deployment.choose(RopeRequest(), 300, 1)


@pytest.mark.parametrize("factor", [1.3, 3.3, 2.0])
def test_a_fractional_factor_comes_back_unchanged(factor: float) -> None:
    """The ceiling of a fractional factor is rounded to whole tokens, but the factor is not."""
    block = {"rope_type": "linear", "factor": factor}
    for policy in ("fixed", "grow"):
        placed = plain(rope_scaling=block, rope_policy=policy).choose(
            RopeRequest(), int(256 * factor), 0
        )
        assert placed.tier.factor == factor
        assert placed.tier.profile.scaling == Linear(factor=factor)


def test_a_longrope_checkpoint_switches_lists_by_request() -> None:
    """As in transformers, the whole prompt has the list of its length, and the answer grows."""
    deployment = make_deployment("m", LONGROPE)
    assert deployment.policy == "grow"
    assert [tier.ceiling for tier in deployment.own_tiers] == [64, 256]
    rotary = LONGROPE.rotary
    short = deployment.choose(RopeRequest(), 64, 6).tier.profile.scaling.frequencies(rotary)
    long = deployment.choose(RopeRequest(), 65, 5).tier.profile.scaling.frequencies(rotary)
    assert float(short.inv_freq_P[0]) == 1.0
    assert float(long.inv_freq_P[0]) == 0.25
    assert short.attention_factor == long.attention_factor > 1


def test_stated_length_moves_the_tiers() -> None:
    """A deployment may state L in its block."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    deployment = plain(rope_scaling=block)
    assert [tier.ceiling for tier in deployment.own_tiers] == [128, 256, 512]


def test_the_rope_of_a_short_answer_can_be_requested() -> None:
    """Short answers report `default`, so a request may name it, but within L only."""
    for policy in POLICIES:
        deployment = plain(allowed_rope_types=["yarn"], rope_policy=policy)
        asked = RopeRequest(rope_type="default")
        reported = deployment.choose(asked, 250, 7)
        assert reported.tier == deployment.choose(RopeRequest(policy="grow"), 250, 7).tier
        with pytest.raises(
            RequestError, match=r"within the native length \(256 tokens\) only"
        ) as no:
            deployment.choose(asked, 250, 8)
        assert no.value.param == "rope.rope_type"
        assert "is 257 positions. Beyond, the field must be one of yarn." in str(no.value)
        assert deployment.choose_open(asked, 250)[0] == 7
        with pytest.raises(ContextLengthError, match="context length is 1024 tokens"):
            deployment.choose(asked, 1024, 2)
    block = {**YARN_BLOCK, "factor": 8.0}
    with pytest.raises(RequestError, match=r"must be yarn\. Given: default"):
        scaled(rope_scaling=block, rope_policy="fixed").choose(
            RopeRequest(rope_type="default"), 3, 2
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"allowed_rope_types": ["default", "linear"]},
            "^allowed_rope_types: must contain yarn, the method of the deployment; got ",
        ),
        ({"allowed_rope_types": []}, "must contain yarn, .*; got nothing"),
        (
            {"max_rope_factor": 4.5},
            "^max_rope_factor: must be <= 4, the factor of the longest tier; got 4.5",
        ),
        ({"max_rope_factor": 3, "rope_tiers": [1, 2]}, "must be <= 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    """The sentence names the deployment, of which there may be several."""
    with pytest.raises(RopeConfigError, match=message):
        plain(**options)


def test_a_request_that_does_not_fit_is_refused_with_the_factor_that_would() -> None:
    """The error states the needed factor in its message and in its details."""
    with pytest.raises(ContextLengthError, match="A rope factor of 5 ") as caught:
        plain().choose(RopeRequest(), 1024, 2)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.details["n_ctx"] == 1024
    assert caught.value.details["rope"]["factor_that_fits"] == 5.0


def test_untouched_requests_say_so() -> None:
    """The native table is called `default`, whatever the deployment's method is."""
    short = plain().choose(RopeRequest(), 10, 5)
    assert (short.tier.profile.scaling.rope_type, short.tier.factor) == ("default", 1.0)
    assert short.tier.profile.scaling == Unscaled()
    long = plain().choose(RopeRequest(), 300, 5)
    assert (long.tier.profile.scaling.rope_type, long.tier.factor) == ("yarn", 2.0)


def test_fixed_uses_the_configured_factor_at_every_length() -> None:
    """The policy `fixed` with yarn is static YaRN."""
    deployment = plain(rope_scaling=YARN_4, rope_policy="fixed")
    placed = deployment.choose(RopeRequest(), 3, 2)
    assert placed.tier.profile.scaling == Yarn(factor=4.0, original_max_position_embeddings=256)
