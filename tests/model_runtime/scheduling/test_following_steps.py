"""The step after a launched one, planned before that one is read; no model is needed."""

from ropewalk.model_runtime.scheduling.step_plan import StepPlan
from tests.model_runtime.scheduling.test_scheduler import computed, scheduler, sequence


def firsts(step: StepPlan | None) -> list[tuple[int, int, bool]]:
    """The place, the size and the kind of each chunk."""
    assert step is not None
    return [(each.first, each.num_tokens, each.is_decode) for each in step.chunks.values()]


def test_the_step_after_a_launched_one_begins_where_its_chunks_end() -> None:
    """A prompt that ends is decoded, one that does not goes on, and one at max_tokens is left."""
    plan = scheduler(max_num_seqs=3)
    for number, (num_prompt, max_tokens) in enumerate(((3, 4), (5, 1), (40, 4))):
        plan.add(sequence(num_prompt, max_tokens, salt=str(number)))
    step = plan.schedule()
    assert firsts(step) == [(0, 3, False), (0, 5, False), (0, 8, False)]
    following = plan.following(step)
    assert firsts(following) == [(3, 1, True), (8, 15, False)]
    assert plan.running[2].num_computed == 0, "nothing is computed before the step is read"
    following = plan.following(step, lambda num_decodes: 7 + num_decodes)
    assert firsts(following) == [(3, 1, True), (8, 8, False)]
    computed(plan, step)
    assert following is not None
    assert firsts(plan.following(following))[0] == (4, 1, True)


def test_a_prompt_that_is_not_in_a_launched_step_is_in_the_next_one() -> None:
    """The budget of the first one was used by an earlier prompt."""
    plan = scheduler(max_num_seqs=2, kv_cache_tokens=800)
    plan.add(sequence(20, salt="a"))
    plan.add(sequence(90, salt="b", priority=1))
    step = plan.schedule()
    assert firsts(step) == [(0, 16, False)]
    assert firsts(plan.following(step)) == [(16, 4, False), (0, 12, False)]


def test_a_prompt_does_not_go_on_ahead_of_requests_that_may_arrive() -> None:
    """A decode does, because its step is short."""
    plan = scheduler()
    plan.add(sequence(20))
    step = plan.schedule()
    assert plan.following(step) is None
    computed(plan, step)
    step = plan.schedule()
    assert firsts(plan.following(step)) == [(20, 1, True)]


def test_nothing_is_preempted_for_a_step_after_a_launched_one() -> None:
    """The tokens are read first, and the step is planned anew."""
    plan = scheduler(max_num_seqs=2, kv_cache_tokens=24)
    plan.add(sequence(8, 16, salt="a"))
    plan.add(sequence(8, 16, salt="b"))
    step = plan.schedule()
    assert plan.following(step) is None
    assert len(plan.running) == 2
    plan.check_integrity()
    computed(plan, step)
    assert len(plan.schedule().preempted) == 1
