"""Blocks that a checkpoint carries: trained ones, and those that were added."""

from typing import Any

import pytest

from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.rope import POLICIES, Policy, RopeConfigError, Unscaled, Yarn, native_rope
from tests.model_runtime.deployments.test_deployment import CONFIG, LONGROPE, YARN_BLOCK, scaled


@pytest.mark.parametrize("policy", [each for each in POLICIES if each != "fixed"])
def test_a_policy_scales_trained_in_scaling_by_length_with_a_warning(policy: Policy) -> None:
    """The operator may know better than the config."""
    deployment = scaled(rope_policy=policy)
    assert [(each.ceiling, each.factor) for each in deployment.own_tiers] == [
        (64, 1),
        (128, 2),
        (256, 4),
    ]
    assert deployment.own_tiers[0].profile.scaling == Unscaled()
    assert deployment.note is not None
    assert "trained with yarn" in deployment.note
    switching = DeploymentOptions(rope_scaling=YARN_BLOCK, rope_policy=policy)
    with pytest.raises(RopeConfigError, match="longrope checkpoints switch by length themselves"):
        make_deployment("m", LONGROPE, switching)


@pytest.mark.parametrize(
    ("block", "max_len", "is_added"),
    [
        # Qwen 2.5 and 3 by their cards, and a block that leaves the length out.
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 256, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 320, True),
        ({"type": "yarn", "factor": 4.0}, 256, True),
        # DeepSeek and gpt-oss, and the authors of YaRN.
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, 256, False),
        (
            {
                "type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 256,
                "finetuned": True,
            },
            1024,
            False,
        ),
        # Llama 3.2 was trained with a block that reaches twice its length.
        (
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "original_max_position_embeddings": 256,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            4096,
            False,
        ),
    ],
)
def test_a_block_that_was_added_scales_by_length(
    block: dict[str, Any], max_len: int, *, is_added: bool
) -> None:
    """A YaRN block that reaches beyond max_position_embeddings was added after training."""
    native = native_rope(
        {"max_position_embeddings": max_len, "head_dim": 16, "rope_scaling": block}
    )
    deployment = make_deployment("m", native)
    first = deployment.own_tiers[0]
    assert (native.added_block is not None, deployment.policy) == (
        (True, "by_position") if is_added else (False, "fixed")
    )
    if not is_added:
        assert (deployment.note, len(deployment.own_tiers)) == (None, 1)
        return
    assert deployment.note is not None
    assert "was added" in deployment.note
    assert [each.ceiling for each in deployment.own_tiers] == [256, 512, 1024]
    assert (first.profile.scaling, deployment.native_len) == (Unscaled(), 256)
    last = deployment.own_tiers[-1].profile.scaling
    assert last == Yarn(factor=4.0, original_max_position_embeddings=256)
    static = make_deployment("m", native, DeploymentOptions(rope_policy="fixed"))
    assert [each.profile.scaling for each in static.own_tiers] == [last]


def test_a_linear_checkpoint_is_served_to_its_extended_length() -> None:
    """A longer context needs another block, which the refusal names."""
    config = {**CONFIG, "rope_scaling": {"type": "linear", "factor": 4.0}}
    native = native_rope(config)
    for stated in (None, 1024):
        deployment = make_deployment("m", native, DeploymentOptions(max_model_len=stated))
        assert (deployment.max_len, deployment.policy, deployment.rope_type) == (
            1024,
            "fixed",
            "linear",
        )
    with pytest.raises(RopeConfigError, match="replaces the linear that the checkpoint was"):
        make_deployment("m", native, DeploymentOptions(max_model_len=2048))
    block = {"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": 256}
    longer = DeploymentOptions(rope_scaling=block, max_model_len=2048)
    assert make_deployment("m", native, longer).max_len == 2048
