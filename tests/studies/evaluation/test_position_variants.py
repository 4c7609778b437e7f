"""Position methods as variants of an evaluation."""

import pytest

from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.rope import NativeRope, native_rope
from ropewalk.studies.evaluation.plan import (
    METHODS,
    PLACED,
    EvalError,
    LengthOptions,
    LengthPlan,
    Variant,
    make_plan,
)

NATIVE: NativeRope = native_rope({"max_position_embeddings": 256, "head_dim": 16})


def plan(
    context_lens: tuple[int, ...], methods: tuple[str, ...] = ("rerope", "dual_chunk")
) -> LengthPlan:
    """A plan over the methods of positions."""
    policies = ("fixed", "by_position", "grow")
    options = LengthOptions(
        context_lens=context_lens, methods=methods, rope_policies=policies, num_queries=0
    )
    return make_plan(options, NATIVE)


def test_fixed_is_always_and_the_others_begin_beyond_l() -> None:
    """The longest length is the reach."""
    found = {}
    for variant in plan((128, 1024)).variants:
        entry = plan((128, 1024)).entry(variant)
        options = DeploymentOptions(
            rope_scaling=entry.rope_scaling, max_model_len=entry.max_model_len
        )
        tiers = make_deployment("m", NATIVE, options, page_size=64).own_tiers
        found[variant.label] = [(tier.ceiling, tier.profile.name) for tier in tiers]
    assert found == {
        "rerope fixed": [(1024, "default+rerope")],
        "rerope by_position": [(256, "default"), (1024, "default+rerope")],
        "rerope grow": [(256, "default"), (1024, "default+rerope")],
        "dual_chunk fixed": [(1024, "default+dual_chunk")],
        "dual_chunk by_position": [(256, "default"), (1024, "default+dual_chunk")],
        "dual_chunk grow": [(256, "default"), (1024, "default+dual_chunk")],
    }


def test_string_is_measured_up_to_its_reach() -> None:
    """L + S - W, 256 + 85 - 42 here; the error names it."""
    entry = plan((128, 256), ("string",)).entry(Variant("string", "fixed"))
    options = DeploymentOptions(rope_scaling=entry.rope_scaling, max_model_len=entry.max_model_len)
    (tier,) = make_deployment("m", NATIVE, options).own_tiers
    assert (tier.ceiling, tier.profile.name) == (256, "default+string")
    with pytest.raises(EvalError, match=r"--context-lens must be <= 299 for string .*, got 512"):
        plan((256, 512), ("string",))


def test_within_l_by_position_is_the_native_table() -> None:
    """There is nothing beyond for the method to read."""
    entry = plan((64, 128)).entry(Variant("rerope", "by_position"))
    assert entry.rope_scaling == {"rope_type": "default"}
    assert entry.max_model_len is None
    assert not set(METHODS) & set(PLACED)
