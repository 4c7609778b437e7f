"""Factors that a request names exactly: their tables, and the configurations that have none."""

from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.errors import RequestError
from ropewalk.rope import NTK, Linear, RopeConfigError, Yarn, native_rope
from ropewalk.server.startup.planning.planned_deployments import num_profiles
from tests.model_runtime.deployments.test_deployment import CONFIG, plain

BLOCK = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_each_method_has_the_factor_and_a_block_keeps_its_other_fields() -> None:
    """256 x 1.3 is no whole number of tokens, and the factor is 1.3 all the same."""
    deployment = plain(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0},
        exact_rope_factors=[1.3],
    )
    scalings = {
        name: deployment.choose(RopeRequest(name, 1.3, is_exact=True), 300, 1).tier.profile.scaling
        for name in ("yarn", "linear", "ntk")
    }
    assert scalings == {
        "yarn": Yarn(factor=1.3, original_max_position_embeddings=256, beta_fast=16.0),
        "linear": Linear(factor=1.3),
        "ntk": NTK(factor=1.3),
    }


def test_without_exact_the_factor_of_no_tier_is_raised() -> None:
    """A further table changes nothing for requests that do not name it."""
    deployment = plain(exact_rope_factors=[1.3])
    assert deployment.choose(RopeRequest(factor=1.3), 300, 1).tier.factor == 2
    assert deployment.own_tiers == plain().own_tiers
    assert num_profiles([deployment]) > num_profiles([plain()])  # room is made at the start


def test_a_factor_above_the_operators_limit_cannot_be_named() -> None:
    """The limit holds for exact factors, and for those of the tiers."""
    deployment = plain(exact_rope_factors=[3.0], max_rope_factor=2)
    for factor in (3.0, 4.0):
        with pytest.raises(RequestError, match="between 1 and 2"):
            deployment.choose(RopeRequest(factor=factor, is_exact=True), 100, 1)
    assert deployment.choose(RopeRequest(factor=2.0, is_exact=True), 100, 1).tier.factor == 2


@pytest.mark.parametrize(
    ("scaling", "options", "message"),
    [
        (None, {"exact_rope_factors": [5.0]}, "exact_rope_factors: must be from 1 to 4.*got 5"),
        (None, {"exact_rope_factors": [0.5]}, "exact_rope_factors: must be from 1 to 4.*got 0.5"),
        (BLOCK, {"exact_rope_factors": [1.3]}, "exact_rope_factors: goes with a method"),
        (
            None,
            {"exact_rope_factors": [1.3], "rope_scaling": {"positions": {"method": "rerope"}}},
            "exact_rope_factors: goes with a method",
        ),
    ],
)
def test_a_configuration_without_such_tables_is_refused(
    scaling: Any, options: dict[str, Any], message: str
) -> None:
    """The error names the setting."""
    native = native_rope(CONFIG if scaling is None else {**CONFIG, "rope_scaling": scaling})
    with pytest.raises(RopeConfigError, match=message):
        make_deployment("m", native, DeploymentOptions(**options))
