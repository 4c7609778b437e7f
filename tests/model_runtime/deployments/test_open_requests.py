"""The length of an answer without max_tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.rope import POLICIES, Policy, native_rope

NATIVE = native_rope({"max_position_embeddings": 256, "head_dim": 16})


@given(
    num_prompt_tokens=st.integers(1, 1024),
    policy=st.sampled_from(POLICIES),
    asked=st.sampled_from([{}, {"factor": 2.0}, {"rope_type": "default"}]),
)
def test_an_answer_may_run_to_the_longest_context(
    num_prompt_tokens: int, policy: Policy, asked: dict[str, Any]
) -> None:
    """As in other servers. The last token takes no position, and the tier is that of the prompt."""
    served = make_deployment("m", NATIVE)
    rope = RopeRequest(policy=policy, **asked)
    end = 512 if policy == "fixed" and "factor" in asked else 1024
    if num_prompt_tokens > end:
        return
    max_tokens, placed = served.choose_open(rope, num_prompt_tokens)
    assert num_prompt_tokens + max_tokens - 1 == end
    assert placed == served.choose(rope, num_prompt_tokens, 1)


@pytest.mark.parametrize("max_len", [100, 257, 1000])
def test_max_model_len_and_the_cache_end_it(max_len: int) -> None:
    stated = make_deployment("m", NATIVE, DeploymentOptions(max_model_len=max_len))
    held = make_deployment("m", NATIVE).within_cache(max_len)
    for served in (stated, held):
        assert served.choose_open(RopeRequest(), 60)[0] == max_len - 59
        assert served.longest_prompt(RopeRequest(), None) == max_len - 31
        assert served.longest_prompt(RopeRequest(), 7) == max_len - 6
