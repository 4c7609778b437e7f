"""The table of each position of a sequence, by its policy."""

import pytest

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.rope import Policy, native_rope

YARN = {"rope_type": "yarn", "factor": 8.0}


@pytest.mark.parametrize(
    ("policy", "ceilings"),
    [
        ("by_position", [256, 256, 512, 512, 1024]),
        ("grow", [512, 512, 512, 512, 1024]),  # a whole prompt is under one table
        ("fixed", [2048] * 5),
    ],
)
def test_a_position_is_computed_under_the_table_of_its_policy(
    policy: Policy, ceilings: list[int]
) -> None:
    """A table of ceiling 512 covers the positions up to 511."""
    native = native_rope({"max_position_embeddings": 256, "head_dim": 8})
    options = DeploymentOptions(rope_scaling=YARN, rope_policy=policy)
    tier_choice = make_deployment("m", native, options).choose(RopeRequest(), 300, 400)
    found = Sequence(Request("r", (0,) * 300, SamplingParams(max_tokens=400), tier_choice))
    assert [found.tier_at(at).ceiling for at in (0, 255, 256, 511, 512)] == ceilings
