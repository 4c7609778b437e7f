"""Position methods of deployments and requests: tiers, defaults and refusals."""

from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.errors import ContextLengthError, RequestError
from ropewalk.rope import (
    DualChunk,
    Profile,
    ReRope,
    RopeConfigError,
    SelfExtend,
    Shifted,
    Sinks,
    native_rope,
)

NATIVE = native_rope({"max_position_embeddings": 256, "head_dim": 16})


def deployment(positions: dict[str, Any] | None = None, **options: Any) -> Deployment:
    """A deployment over the plain checkpoint, with pages of 16."""
    if positions is not None:
        options["rope_scaling"] = {"rope_type": "default", "positions": positions}
    return make_deployment("m", NATIVE, DeploymentOptions(**options), page_size=16)


@pytest.mark.parametrize(
    ("positions", "expected", "ceiling"),
    [
        ({"method": "rerope"}, ReRope(128), 4096),
        ({"method": "self_extend"}, SelfExtend(64, 64), 4096),
        ({"method": "self_extend", "group": 16}, SelfExtend(64, 16), 3136),
        ({"method": "dual_chunk"}, DualChunk(192, 32), 4096),
        ({"method": "dual_chunk", "parameters": "paper"}, DualChunk(255, 63), 4096),
        ({"method": "dual_chunk", "parameters": "qwen"}, DualChunk(256, 16), 4096),
        ({"method": "dual_chunk", "chunk_size": 128, "local_size": 64}, DualChunk(128, 64), 4096),
        ({"method": "string"}, Shifted(85, 42), 299),
        ({"method": "sinks"}, Sinks(4, 252), 4096),
    ],
)
def test_defaults_are_those_of_the_authors_in_whole_pages(
    positions: dict[str, Any], expected: object, ceiling: int
) -> None:
    """L is 256; a method without a limit reaches 16 L unless max_model_len says otherwise.

    The table is the trained one, so its factor is 1.
    """
    tier = deployment(positions).own_tiers[-1]
    assert (tier.profile.positions, tier.ceiling) == (expected, ceiling)
    assert tier.factor == 1


def test_pages_larger_than_a_chunk_still_get_a_default() -> None:
    """The embedded model has L = 256, and the default page is 64."""
    block = {"rope_type": "default", "positions": {"method": "dual_chunk"}}
    made = make_deployment("m", NATIVE, DeploymentOptions(rope_scaling=block), page_size=64)
    assert made.own_tiers[-1].profile.positions == DualChunk(192, 64)


def test_pinned_has_a_native_tier_and_always_has_none() -> None:
    """Under pinned the first tier is the checkpoint as it was trained."""
    pinned = deployment({"method": "rerope"})
    assert [tier.ceiling for tier in pinned.own_tiers] == [256, 4096]
    assert pinned.own_tiers[0].profile.positions is None
    assert pinned.own_tiers[1].profile.logn_len == 256
    always = deployment({"method": "rerope", "when": "always"}, max_model_len=1000)
    assert [tier.ceiling for tier in always.own_tiers] == [1000]
    plain = make_deployment(
        "m",
        NATIVE,
        DeploymentOptions(
            rope_scaling={
                "rope_type": "default",
                "use_logn_attn": False,
                "positions": {"method": "rerope"},
            }
        ),
    )
    assert plain.own_tiers[-1].profile.logn_len is None


def test_only_the_temperature_of_qwen_has_a_tier_for_every_ceiling() -> None:
    """Its s is 0.1 ln(ceiling / L) + 1."""
    tiers = deployment({"method": "dual_chunk", "temperature": "qwen"}).own_tiers
    assert [tier.ceiling for tier in tiers] == [256, 512, 1024, 2048, 4096]
    factors = [tier.profile.positions.temperature_factor for tier in tiers[1:]]  # type: ignore[union-attr]
    assert factors == pytest.approx([1.0693, 1.1386, 1.2079, 1.2773], abs=1e-4)
    assert tiers[-1].profile.num_native == 0


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"method": "magic"}, "positions.method: must be one of native, .*; got 'magic'"),
        ("rerope", "positions: must be an object, got 'rerope'"),
        (
            {"method": "rerope", "window": 300},
            r"positions.window: must be <= the trained length \(256\), got 300",
        ),
        (
            {"method": "rerope", "group": 2},
            "positions.group: is not a field of the method 'rerope'",
        ),
        (
            {"method": "self_extend", "window": 64, "group": 24},
            r"positions.group: must divide the window \(64\), got 24",
        ),
        (
            {"method": "self_extend", "window": 72, "group": 24},
            r"positions.group: is 24, which must divide the page size \(16\)",
        ),
        (
            {"method": "dual_chunk", "chunk_size": 192, "local_size": 33},
            r"minus local_size is 159, which must be a multiple of the page size \(16\)",
        ),
        (
            {"method": "dual_chunk", "chunk_size": 300},
            r"positions.chunk_size: must be <= the trained length \(256\), got 300",
        ),
        (
            {"method": "sinks", "sinks": 16, "window": 250},
            r"positions.window: must be <= the trained length less the sinks \(240\), got 250",
        ),
        (
            {"method": "string", "window": 90},
            r"positions.window: must be <= the shift \(85\), got 90",
        ),
        (
            {"method": "rerope", "when": "later"},
            "positions.when: must be one of pinned, always; got 'later'",
        ),
    ],
)
def test_a_bad_parameter_is_refused_by_name_with_both_numbers(
    positions: dict[str, Any], message: str
) -> None:
    """A sentence that names field, limit and value."""
    with pytest.raises(RopeConfigError, match=message):
        deployment(positions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "positions": {"method": "rerope"},
                }
            },
            "positions: goes with rope_type default, the trained table; got yarn",
        ),
        (
            {"positions": {"method": "rerope"}, "rope_tiers": [1, 2]},
            r"rope_tiers: has no meaning beside positions \(rerope\)",
        ),
        (
            {"positions": {"method": "self_extend", "group": 16}, "max_model_len": 4000},
            r"max_model_len: must be <= what self_extend reaches \(3136 tokens\), got 4000",
        ),
        (
            {"positions": {"method": "rerope"}, "max_model_len": 200},
            "positions.when: is pinned, which begins beyond the trained length",
        ),
        ({"allowed_positions": ["magic"]}, "allowed_positions: accepts native, .*; got 'magic'"),
        (
            {"positions": {"method": "rerope"}, "allowed_positions": ["sinks"]},
            "allowed_positions: must contain rerope, the method of the deployment; got sinks",
        ),
    ],
)
def test_a_choice_that_cannot_be_served_is_refused(options: dict[str, Any], message: str) -> None:
    """By the name of the setting."""
    with pytest.raises(RopeConfigError, match=message):
        deployment(**options)


def test_a_request_names_an_allowed_method_with_the_servers_parameters() -> None:
    """Other numbers are refused with both of them, because each would be another table."""
    made = deployment(allowed_positions=["rerope", "self_extend", "native"])
    asked = RopeRequest(positions={"method": "rerope", "window": 128})
    tier = made.choose(asked, 500, 10).tier
    assert tier.profile == Profile(tier.profile.scaling, 256, ReRope(128))
    assert made.choose(asked, 100, 10).tier.profile.positions is None
    assert made.choose(RopeRequest(), 500, 10).tier.profile.positions is None
    with pytest.raises(RequestError, match=r"`rope\.positions\.window` must be 128.* Given: 64"):
        made.choose(RopeRequest(positions={"method": "rerope", "window": 64}), 500, 10)
    with pytest.raises(RequestError, match="is not a field of this method"):
        made.choose(RopeRequest(positions={"method": "rerope", "group": 64}), 500, 10)
    with pytest.raises(RequestError, match=r"must be one of native, rerope, self_extend \(allowed"):
        made.choose(RopeRequest(positions={"method": "sinks"}), 500, 10)
    with pytest.raises(RequestError, match="go with `rope_type` default"):
        made.choose(RopeRequest(rope_type="yarn", positions={"method": "rerope"}), 500, 10)
    with pytest.raises(ContextLengthError):
        made.choose(RopeRequest(rope_type="default", positions={"method": "native"}), 500, 10)


def test_a_deployment_without_allowed_positions_accepts_its_own_and_native() -> None:
    """Native ends at L, as it does for every deployment."""
    made = deployment({"method": "sinks"})
    assert made.position_methods == ["native", "sinks"]
    asked = RopeRequest(positions={"method": "native"})
    assert made.choose(asked, 200, 10).tier.profile.positions is None
    with pytest.raises(ContextLengthError):
        made.choose(asked, 300, 10)
    assert deployment().position_methods == []
    with pytest.raises(
        RequestError, match="must be absent, unless the operator allows methods with allowed_pos"
    ):
        deployment().choose(asked, 200, 10)


METHODS = ("dual_chunk", "rerope", "self_extend", "sinks", "string")
LENGTHS = (*range(1, 34), 48, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256, 257, 500, 512, 513)
CHOICES = ("own", "listed", "listed beside yarn")


def _with_defaults(choice: str, method: str, native_len: int, page_size: int, length: int) -> Any:
    """A deployment with a method under its defaults, and a longest context."""
    native = native_rope({"max_position_embeddings": native_len, "head_dim": 16})
    given: dict[str, Any] = {"max_model_len": length}
    if choice == "own":
        given["rope_scaling"] = {"rope_type": "default", "positions": {"method": method}}
    elif choice == "listed":
        own = {"method": "rerope", "when": "always"}
        given["rope_scaling"] = {"rope_type": "default", "positions": own}
        given["allowed_positions"] = ["native", "rerope", method]
    else:
        given["rope_scaling"] = {"rope_type": "yarn", "factor": 16.0}
        given["allowed_positions"] = ["native", method]
    return make_deployment("m", native, DeploymentOptions(**given), page_size)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("native_len", [64, 100, 128, 256])
@pytest.mark.parametrize("page_size", [4, 16, 48, 64, 256])
def test_defaults_contradict_each_other_at_no_length(
    choice: str, method: str, native_len: int, page_size: int
) -> None:
    """A refusal names the length that the operator has given, and never a default."""
    for length in (*LENGTHS, 4 * native_len, 16 * native_len):
        try:
            made = _with_defaults(choice, method, native_len, page_size, length)
        except RopeConfigError as error:
            told = str(error)
            if "begins beyond the trained length" in told:
                assert length <= native_len
            elif "minus local_size" in told:  # no chunk is a multiple of such a page
                assert page_size > native_len * 5 // 8
            else:
                assert told.startswith(f"max_model_len: must be <= what {method} reaches")
                assert length > native_len
        else:
            assert made.max_len == length


def test_a_listed_method_follows_the_longest_context() -> None:
    """The group of 16 L was taken, which does not divide the window."""
    made = _with_defaults("listed beside yarn", "self_extend", 128, 16, 512)
    assert made.tiers["self_extend"].ascending[-1].profile.positions == SelfExtend(32, 16)
    assert made.tiers["self_extend"].ascending[-1].ceiling == 512


def test_a_longest_context_below_the_trained_length_serves_open_requests() -> None:
    made = deployment({"method": "rerope", "when": "always"}, max_model_len=100)
    assert [(tier.ceiling, tier.factor) for tier in made.own_tiers] == [(100, 1.0)]
    assert made.choose(RopeRequest(), 60, 10).tier.ceiling == 100
    assert made.choose_open(RopeRequest(), 60)[0] == 41
