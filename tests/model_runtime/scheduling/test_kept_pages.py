"""Pages between sinks and window are released while a sequence runs."""

import pytest

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import TierChoice
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import HOLE, Sequence, most_pages
from ropewalk.rope import Policy, Profile, Sinks, Tier, Unscaled

PAGE, CHUNK = 4, 16
NATIVE = Tier(32, 1.0, Profile(Unscaled()))
SINKS = Tier(10**6, 4.0, Profile(Unscaled(), positions=Sinks(5, 20)))


def sequence(
    num_tokens: int, policy: Policy = "fixed", salt: str = "", **sampling: int
) -> Sequence:
    """A sequence under sinks; a growing one is native up to 32 tokens."""
    tiers = (NATIVE, SINKS) if policy.startswith("grow") else (SINKS,)
    tier_choice = TierChoice("m", tiers[0], tiers[1:], policy, None, 32)
    params = SamplingParams(max_tokens=10**6, **sampling)
    return Sequence(Request("r", tuple(range(num_tokens)), params, tier_choice, salt))


def scheduler(num_pages: int) -> Scheduler:
    """A scheduler with little room."""
    return Scheduler(
        EngineConfig(
            kv_cache_tokens=num_pages * PAGE,
            max_model_len=10**6,
            page_size=PAGE,
            max_num_batched_tokens=CHUNK,
        )
    )


def step(plan: Scheduler) -> None:
    """Compute a step, and add a token where one is due. Every page that is read must be held."""
    done = plan.schedule()
    for each, chunk in done.chunks.items():
        first, last = each.num_computed, each.num_computed + chunk.num_tokens - 1
        method = each.tier_at(first).profile.positions
        if method is not None:
            read = {*range(min(5, last + 1)), *range(max(5, first - 19), last + 1)}
            read |= set(range(last + 1)) if last < 25 else set()
            assert all(each.pages[position // PAGE] != HOLE for position in read)
        is_last = chunk.is_last
        plan.computed(chunk)
        if is_last:
            each.token_ids.append(7)


@pytest.mark.parametrize("policy", ["grow", "grow-exact", "by_position", "fixed"])
def test_the_pool_stays_bounded_over_20_000_tokens(policy: Policy) -> None:
    """Decoding holds the pages of 5 sinks and 20 recent tokens, and a page or two beside them."""
    plan = scheduler(60)
    one = sequence(10, policy)
    most = most_pages(one.request.tier_choice, PAGE, CHUNK)
    assert most is not None
    plan.add(one)
    held = []
    while len(one.token_ids) < 20_000:
        step(plan)
        held.append(plan.pool.num_used)
    assert max(held) <= most < 20
    assert max(held[200:]) <= -(-5 // PAGE) + -(-20 // PAGE) + 2
    plan.check_integrity()
    plan.remove(one)
    assert plan.pool.num_used == 0
    plan.check_integrity()


def test_a_prompt_far_longer_than_the_cache_is_admitted_beside_others() -> None:
    """Admission counts what a sequence holds at a time, so three of them fit."""
    plan = scheduler(42)
    sequences = [sequence(2000, salt=str(at)) for at in range(3)]
    for each in sequences:
        plan.add(each)
    for _ in range(1500):
        step(plan)
        plan.check_integrity()
    assert len(plan.running) == 3
    assert all(each.num_computed >= 2000 for each in sequences)


def test_only_the_first_tokens_are_published() -> None:
    """Later pages are released, so another sequence does not wait for them."""
    plan = scheduler(60)
    first = sequence(100)
    plan.add(first)
    for _ in range(10):
        step(plan)
    assert len(plan.pages.index.published()) == 25 // PAGE
    second = sequence(100)
    plan.add(second)
    step(plan)
    assert second.is_running
    assert second.num_cached_tokens == 25 // PAGE * PAGE
