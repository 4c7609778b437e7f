"""The load by which `benchmarks.router --prefixes` compares two routers."""

import json
from collections import Counter

from benchmarks.router import PrefixLoad


def test_prompts_of_a_group_have_their_beginning_in_common_and_no_more() -> None:
    """Another turn has no beginning in common with the first."""
    load = PrefixLoad(num_groups=3, num_of_group=4, prefix_len=64)
    turns = [[json.loads(each)["prompt"] for each in load.bodies(seed)] for seed in (1, 2)]
    for prompts in turns:
        assert {len(each) for each in prompts} == {64 + load.own_len}
        assert set(Counter(tuple(each[:64]) for each in prompts).values()) == {4}
        assert len({tuple(each[:66]) for each in prompts}) == 12
    firsts = [{tuple(each[:8]) for each in prompts} for prompts in turns]
    assert not firsts[0] & firsts[1]
