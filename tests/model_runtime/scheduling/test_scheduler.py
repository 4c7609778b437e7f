"""The choice of the tokens that are computed next; no model is needed."""

from typing import Any

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.scheduling.step_plan import StepPlan
from ropewalk.rope import native_rope

DEPLOYMENT = make_deployment("m", native_rope({"max_position_embeddings": 256, "head_dim": 8}))


def sequence(
    num_prompt_tokens: int, max_tokens: int = 4, salt: str = "", priority: int = 0, **params: Any
) -> Sequence:
    """A sequence with that many prompt tokens, all alike."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    tier_choice = DEPLOYMENT.choose(RopeRequest(), num_prompt_tokens, max_tokens)
    prompt_ids = tuple([0] * num_prompt_tokens)
    return Sequence(Request("r", prompt_ids, sampling, tier_choice, salt, priority=priority))


def scheduler(**config: Any) -> Scheduler:
    """A scheduler with small limits."""
    numbers = {
        "kv_cache_tokens": 160,
        "max_model_len": 1024,
        "page_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        **config,
    }
    return Scheduler(EngineConfig(**numbers))


def computed(plan: Scheduler, step: StepPlan) -> None:
    """Update the sequences like the engine does after a step."""
    for chunk in step.chunks.values():
        last = chunk.is_last
        plan.computed(chunk)
        if last:
            chunk.sequence.token_ids.append(0)


def sizes(step: StepPlan) -> list[int]:
    """The tokens of each chunk."""
    return [chunk.num_tokens for chunk in step.chunks.values()]


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one() -> None:
    """The oldest prompt gets a quarter of the budget; those with least left get the rest."""
    plan = scheduler(kv_cache_tokens=800)
    long, middle, short = sequence(100), sequence(30, salt="m"), sequence(6, salt="s")
    for each in (long, middle, short):
        plan.add(each)
    step = plan.schedule()
    assert {each: chunk.num_tokens for each, chunk in step.chunks.items()} == {
        long: 4,
        short: 6,
        middle: 6,
    }


def test_a_prompt_is_not_overtaken_by_one_that_is_no_shorter() -> None:
    """The scheduler compares the remaining tokens of both prompts."""
    plan = scheduler(kv_cache_tokens=800)
    first, second = sequence(40, salt="first"), sequence(40, salt="second")
    for each in (first, second):
        plan.add(each)
    order = []
    while not second.is_decoding:
        step = plan.schedule()
        computed(plan, step)
        order.append([(each, chunk.num_tokens) for each, chunk in step.chunks.items()])
    assert order[:3] == [[(first, 16)], [(first, 16)], [(first, 8), (second, 8)]]


def test_the_oldest_prompt_takes_the_tokens_that_shorter_ones_leave() -> None:
    """A prompt with logprobs takes a row of logits per token, so the limit of rows stops it."""
    plan = scheduler(kv_cache_tokens=800, max_num_logit_rows=3)
    long, scored = sequence(100), sequence(30, salt="s", prompt_logprobs=1)
    for each in (long, scored):
        plan.add(each)
    assert {each: chunk.num_tokens for each, chunk in plan.schedule().chunks.items()} == {
        long: 13,
        scored: 3,
    }
    plan.check_integrity()


def test_the_oldest_prompt_is_read_on_however_many_short_ones_arrive() -> None:
    """The oldest prompt's speed falls to a quarter at worst."""
    plan = scheduler(kv_cache_tokens=800)
    long = sequence(96, salt="long")
    plan.add(long)
    steps = 0
    while not long.is_decoding:
        for number in range(3):
            plan.add(sequence(8, max_tokens=1, salt=f"{steps}-{number}"))
        step = plan.schedule()
        plan.check_integrity()
        computed(plan, step)
        for each in [*step.chunks]:
            if each is not long and each.num_generated:
                plan.remove(each)
        steps += 1
    # A quarter of 16 each step, until it has no more left than one of the others.
    assert steps == (96 - 8) // 4 + 1
    assert plan.waiting


def test_a_step_computes_no_more_of_prompts_than_it_is_told() -> None:
    """Decodes do not count towards `num_prefill_tokens`."""
    plan = scheduler()
    short = sequence(3)
    plan.add(short)
    computed(plan, plan.schedule())
    plan.add(sequence(60))
    step = plan.schedule(num_prefill_tokens=lambda _: 5)
    assert sizes(step) == [1, 5]
    assert step.num_prefill_tokens == 5


def test_no_budget_for_prompts_is_no_chunk() -> None:
    """The number of decodes may reach the budget of the whole step."""
    plan = scheduler(max_num_batched_tokens=3)
    for number in range(3):
        plan.add(sequence(1, salt=str(number)))
    computed(plan, plan.schedule())
    plan.add(sequence(9, salt="late"))
    assert sizes(plan.schedule()) == [1, 1, 1]
    assert sizes(plan.schedule(num_prefill_tokens=lambda _: -1)) == [1, 1, 1]


def test_waiting_requests_start_in_order_and_are_not_overtaken() -> None:
    """The big request starts as soon as pages are released, before the small one."""
    plan = scheduler()
    first, big, small = sequence(90, salt="1"), sequence(100, salt="2"), sequence(5, salt="3")
    for each in (first, big, small):
        plan.add(each)
    plan.schedule()
    assert plan.running == [first]
    assert list(plan.waiting) == [big, small]
    plan.remove(first)
    plan.schedule()
    assert plan.running == [big, small]


def test_no_page_is_taken_for_tokens_that_may_come() -> None:
    """As many requests run with the largest max_tokens as with a small one."""
    for max_tokens in (4, 1017):
        plan = scheduler(kv_cache_tokens=64, max_num_seqs=8, max_num_batched_tokens=64)
        for number in range(8):
            plan.add(sequence(8, max_tokens, salt=str(number)))
        assert len(plan.schedule().chunks) == plan.pool.num_used == 8


def test_when_pages_run_out_the_last_to_arrive_gives_up_its_own() -> None:
    """A preempted request returns to its old place; the first request is never preempted."""
    plan = scheduler(kv_cache_tokens=48)  # six pages of eight
    first, second, third = sequence(15, 30), sequence(14, 30), sequence(3, 2, salt="other")
    for each in (first, second, third):
        plan.add(each)
    preempted = []
    for _ in range(200):
        step = plan.schedule()
        preempted += step.preempted
        plan.check_integrity()
        computed(plan, step)
        for each in [*step.chunks]:
            if each.num_generated >= each.request.sampling.max_tokens:
                plan.remove(each)
    assert first not in preempted
    assert second in preempted
    assert not plan.running
    assert not plan.waiting


def test_a_prefix_that_another_request_computes_is_waited_for() -> None:
    """A request waits for pages that another one is computing, and then shares them."""
    plan = scheduler(max_num_batched_tokens=16)
    one, same, other = sequence(40), sequence(40), sequence(5, salt="other")
    for each in (one, same, other):
        plan.add(each)
    step = plan.schedule()
    assert set(step.chunks) == {one, other}
    assert plan.running == [one, other]
    for _ in range(3):
        computed(plan, step)
        step = plan.schedule()
    assert same in plan.running
    assert same.num_cached_tokens == 32
    assert same.pages[:4] == one.pages[:4]
    assert same.pages[4:] != one.pages[4:5]


def test_a_short_prompt_does_not_wait_behind_longer_ones_for_the_page_of_a_long_one() -> None:
    """The long prompt goes first until the page is shared, then the short one, then the rest."""
    plan = scheduler(kv_cache_tokens=1600, max_num_seqs=8)
    names = {
        sequence(200, salt="oldest"): "oldest",
        sequence(100, salt="shared"): "long",
        sequence(40, salt="between"): "between",
        sequence(60, salt="other"): "other",
    }
    for each in names:
        plan.add(each)
    computed(plan, plan.schedule())
    short = sequence(12, salt="shared")
    names[short] = "short"
    plan.add(short)
    table = []
    for _ in range(4):
        step = plan.schedule()
        table.append({names[each]: chunk.num_tokens for each, chunk in step.chunks.items()})
        computed(plan, step)
        plan.check_integrity()
    assert table == [
        {"oldest": 4, "long": 12},  # the short one waits for its first eight tokens
        {"short": 4, "oldest": 4, "between": 8},
        {"short": 1, "oldest": 4, "between": 11},
        {"short": 1, "oldest": 4, "between": 9, "other": 2},
    ]


def test_a_short_prompt_does_not_wait_behind_longer_ones_for_the_page_of_the_oldest() -> None:
    """The oldest prompt has the whole budget until the page is shared."""
    plan = scheduler(kv_cache_tokens=1600, max_num_seqs=8)
    for num_tokens, salt in ((200, "shared"), (40, "between"), (12, "shared")):
        plan.add(sequence(num_tokens, salt=salt))
    step = plan.schedule()
    assert sizes(step) == [16]
    computed(plan, step)
    assert sizes(plan.schedule()) == [4, 4, 8]  # the short one, the oldest, the one between


def test_cached_pages_that_it_will_share_are_not_counted_as_room() -> None:
    """A sequence that counted its shared pages as room would be preempted at once."""
    plan = scheduler(kv_cache_tokens=80)  # ten pages
    first = sequence(40, 1)
    plan.add(first)
    for _ in range(3):
        computed(plan, plan.schedule())
    plan.remove(first)
    assert plan.pool.num_cached == 5
    blocker = sequence(30, 40, salt="other")  # takes four of the five free ones
    plan.add(blocker)
    for _ in range(2):
        computed(plan, plan.schedule())
    late = sequence(56, 1)  # five cached pages and two more; one is free
    plan.add(late)
    step = plan.schedule()
    assert late in plan.waiting
    assert step.preempted == []


def test_after_a_nan_no_sequence_publishes_pages_that_may_be_wrong() -> None:
    """Sequences that run during a NaN publish no more pages; later sequences do."""
    plan = scheduler()
    ill = sequence(40, 4)
    plan.add(ill)
    computed(plan, plan.schedule())
    assert plan.pages.index.published()
    plan.invalidate_prefix_cache()
    for _ in range(3):
        computed(plan, plan.schedule())
    assert plan.pages.index.published() == {}
    well = sequence(40, 4)
    plan.add(well)
    computed(plan, plan.schedule())
    assert well in plan.running
    assert list(plan.pages.index.published().values()) == well.pages[:1]


def test_a_lower_priority_number_starts_first_and_is_preempted_last() -> None:
    """Within a priority the order is that of arrival."""
    plan = scheduler(max_num_seqs=2)
    arrived = [sequence(4, salt=str(each), priority=each) for each in (3, 0, -2, 0)]
    for each in arrived:
        plan.add(each)
    computed(plan, plan.schedule())
    three, zero, minus_two, later_zero = arrived
    assert plan.running == [minus_two, zero]
    assert plan.waiting == [later_zero, three]
    assert plan.make_room() == [zero]
    assert plan.waiting == [zero, later_zero, three]
    plan.check_integrity()


def test_prompts_of_a_later_priority_take_only_what_is_left() -> None:
    """A shorter prompt goes before a longer one only if its priority is not later."""
    plan = scheduler(max_num_batched_tokens=20)
    late, long, short = (
        sequence(length, salt=str(length), priority=priority)
        for length, priority in ((3, 1), (40, 0), (8, 0))
    )
    for each in (late, long, short):
        plan.add(each)
    step = plan.schedule()
    assert {each: chunk.num_tokens for each, chunk in step.chunks.items()} == {long: 12, short: 8}


def test_an_early_priority_does_not_wait_for_a_page_that_a_late_one_computes() -> None:
    """Prompts between the two could keep the late one from its page without end."""
    plan = scheduler(kv_cache_tokens=320, max_num_batched_tokens=8)
    plan.add(sequence(24, salt="shared", priority=9))
    computed(plan, plan.schedule())
    early, between, equal = (
        sequence(24, salt=salt, priority=priority)
        for salt, priority in (("shared", 0), ("other", 5), ("shared", 9))
    )
    for each in (equal, between, early):
        plan.add(each)
    for _ in range(3):
        step = plan.schedule()
        assert early in step.chunks or early.is_decoding
        assert not equal.is_running
        computed(plan, step)
        plan.check_integrity()
    assert early.num_generated > 0


def test_a_late_priority_gives_its_pages_to_an_early_one() -> None:
    """It runs already, and yet the early one grows on its pages."""
    plan = scheduler(kv_cache_tokens=48, max_num_batched_tokens=64)
    late, early = sequence(24, salt="a", priority=1), sequence(16, 20, salt="b")
    plan.add(late)
    computed(plan, plan.schedule())
    plan.add(early)
    for _ in range(12):
        computed(plan, plan.schedule())
        plan.check_integrity()
        if not late.is_running:
            break
    assert early.is_running
    assert not late.is_running


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    """A sequence that decodes never waits for a prompt."""
    plan = scheduler()
    short, long = sequence(3), sequence(60)
    plan.add(short)
    computed(plan, plan.schedule())
    plan.add(long)
    step = plan.schedule()
    assert [(each, chunk.num_tokens) for each, chunk in step.chunks.items()] == [
        (short, 1),
        (long, 15),
    ]


def test_no_more_sequences_run_than_allowed() -> None:
    """The limit of running sequences is max_num_seqs."""
    plan = scheduler()
    for _ in range(6):
        plan.add(sequence(3))
    plan.schedule()
    assert (len(plan.running), len(plan.waiting)) == (4, 2)


def test_another_salt_shares_nothing() -> None:
    """A request with another salt shares nothing, and neither does one with prompt logprobs."""
    plan = scheduler()

    def cached(salt: str, **params: Any) -> int | None:
        each = sequence(25, 1, salt=salt, **params)
        plan.add(each)
        for _ in range(4):
            if not each.num_generated:
                computed(plan, plan.schedule())
        plan.remove(each)
        return each.num_cached_tokens

    assert [cached("a"), cached("b"), cached("a", prompt_logprobs=0), cached("a")] == [0, 0, 0, 24]
