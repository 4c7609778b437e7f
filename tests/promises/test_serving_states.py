"""A state machine over scheduler, page pool and prefix index, with a model of the pages.

The model keeps, for every page, the history of what was computed into it: (profile, salt, and the
tokens with the profiles they were computed under, from the first position on). Whatever a sequence
reads must be the history that it would have made itself.
"""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.scheduling.step_plan import StepPlan
from ropewalk.rope import POLICIES, native_rope

PAGE, PAGES = 4, 20
NATIVE = native_rope({"max_position_embeddings": 16, "head_dim": 8})
DEPLOYMENT = make_deployment(
    "m", NATIVE, DeploymentOptions(rope_scaling={"rope_type": "yarn", "factor": 4.0})
)
SEEN: Counter[str] = Counter()


class Serving(RuleBasedStateMachine):
    """Requests arrive, are computed, cross tiers, are preempted, are aborted, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            EngineConfig(
                kv_cache_tokens=PAGE * PAGES,
                max_model_len=64,
                page_size=PAGE,
                max_num_seqs=5,
                max_num_batched_tokens=12,
                max_num_logit_rows=6,
            )
        )
        self.live: list[Sequence] = []
        # (page, offset) -> what was computed there: position, token, profile, salt, and what of
        # all positions before it was read
        self.content: dict[tuple[int, int], Any] = {}

    @rule(
        shape=st.tuples(st.integers(1, 30), st.integers(0, 30)),
        policy=st.sampled_from(POLICIES),
        family=st.integers(0, 2),
        salt=st.sampled_from(["", "a"]),
        scored=st.booleans(),
    )
    def arrive(
        self,
        shape: tuple[int, int],
        policy: str,
        family: int,
        salt: str,
        scored: bool,  # noqa: FBT001
    ) -> None:
        """Add a request; prompts of one family have a common prefix."""
        num_prompt, max_tokens = shape
        tier_choice = DEPLOYMENT.choose(RopeRequest(policy=policy), num_prompt, max_tokens)
        prompt = tuple((family * 7 + at * (1 + family)) % 5 for at in range(num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1 if scored else None)
        sequence = Sequence(Request("r", prompt, sampling, tier_choice, salt))
        self.scheduler.add(sequence)
        self.live.append(sequence)
        SEEN["arrive"] += 1

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """Run some steps of the scheduler."""
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        """Abort one of the live requests."""
        self._end(self.live[which % len(self.live)])
        SEEN["abort"] += 1

    @rule()
    def invalidate(self) -> None:
        """Invalidate the cache, as after a NaN: no page computed so far may be found."""
        self.scheduler.invalidate_prefix_cache()
        assert self.scheduler.pages.index.published() == {}
        assert self.scheduler.pool.num_cached == 0

    @invariant()
    def everything_adds_up(self) -> None:
        """Check the integrity of the scheduler after every rule."""
        self.scheduler.check_integrity()
        known = [*self.scheduler.running, *self.scheduler.waiting]
        assert {id(each) for each in known} == {id(each) for each in self.live}

    def teardown(self) -> None:
        """Run until every sequence has ended; all pages must be free then."""
        for _ in range(2000):
            if not self.live:
                break
            before = sum(len(each.token_ids) + each.num_computed for each in self.live)
            plan = self._step()
            after = sum(len(each.token_ids) + each.num_computed for each in self.live)
            assert plan.chunks or before != after, "nothing moves"
        assert not self.live, "a request starves"
        assert self.scheduler.pool.num_used == 0

    def _step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        SEEN["step"] += 1
        SEEN["preempt"] += len(plan.preempted)
        SEEN["cross"] += len(plan.rescaled)
        assert sum(chunk.num_tokens for chunk in plan.chunks.values()) <= 12
        histories = {}
        for sequence, chunk in plan.chunks.items():
            history = self._read(sequence)
            for position in range(chunk.first, chunk.first + chunk.num_tokens):
                assert chunk.tier.ceiling > position
                salt = sequence.request.cache_salt
                history.append((position, sequence.token_ids[position], chunk.tier.profile, salt))
            histories[sequence] = history
        for sequence, chunk in plan.chunks.items():
            for position in range(chunk.first, chunk.first + chunk.num_tokens):
                where = sequence.pages[position // PAGE], position % PAGE
                self.content[where] = histories[sequence][position]
        for sequence, chunk in plan.chunks.items():
            is_last = chunk.is_last
            self.scheduler.computed(chunk)
            if chunk.is_scored:
                sequence.num_scored = min(sequence.num_computed, sequence.num_prompt_tokens)
            if is_last:
                self._next_token(sequence)
        return plan

    def _read(self, sequence: Sequence) -> list[Any]:
        """The history in the pages of a sequence, which must be the one that it expects."""
        history = []
        for position in range(sequence.num_computed):
            entry = self.content[sequence.pages[position // PAGE], position % PAGE]
            profile = self._profile(sequence, position)
            salt = sequence.request.cache_salt
            expected = (position, sequence.token_ids[position], profile, salt)
            assert entry == expected, "a page holds something else"
            history.append(entry)
        if sequence.num_computed and sequence.num_cached_tokens:
            SEEN["shared"] += 1
        return history

    @staticmethod
    def _profile(sequence: Sequence, position: int) -> Any:
        """The profile that a position is computed under, from the definition of the policies."""
        tier_choice = sequence.request.tier_choice
        if tier_choice.policy == "grow":
            so_far = max(sequence.num_prompt_tokens, position + 1)
        elif tier_choice.policy == "by_position":
            so_far = position + 1
        elif tier_choice.policy == "grow-exact":
            so_far = max(sequence.num_prompt_tokens, len(sequence.token_ids))
        else:
            return tier_choice.tier.profile
        tiers = DEPLOYMENT.method_tiers
        return next(tier.profile for tier in tiers if tier.ceiling >= so_far)

    def _next_token(self, sequence: Sequence) -> None:
        if sequence.request.sampling.max_tokens > 0:
            sequence.token_ids.append((3 * len(sequence.token_ids) + 1) % 5)
        if sequence.num_generated >= sequence.request.sampling.max_tokens:
            self._end(sequence)
            SEEN["finish"] += 1

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)


Serving.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking these takes minutes
    suppress_health_check=list(HealthCheck),
)


class TestServing(Serving.TestCase):  # type: ignore[misc, name-defined]
    """The machine under pytest; afterwards, every kind of event must have been seen."""

    def runTest(self) -> None:
        """Run the machine, then check the events it has seen."""
        super().runTest()
        assert SEEN["step"] >= 2000, SEEN
        for event in ("arrive", "abort", "finish", "cross", "preempt", "shared"):
            assert SEEN[event] >= 50, SEEN
