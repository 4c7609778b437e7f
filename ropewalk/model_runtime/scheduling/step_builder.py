"""One step while it is planned. Chunks are added to it, and late sequences are preempted for it.

The step after a launched one is planned before the tokens of that one are known. It begins where
the launched chunks end, and nothing is preempted for it.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.scheduling.sequence_pages import SequencePages
from ropewalk.model_runtime.scheduling.step_plan import Chunk, StepPlan


@dataclass(slots=True)
class Queues:
    """The sequences that wait and those that run, each by priority and then by arrival."""

    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    num_waiting_tokens: int = 0  # of the prompts of those that wait
    # Tail pages are taken and given back in turn, so there are as many as ran at a time.
    _num_tails: int = 0
    _free_tails: list[int] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)
        self.num_waiting_tokens += sequence.num_prompt_tokens

    def start(self, sequence: Sequence) -> None:
        """Let a waiting sequence run, with a tail page."""
        self.waiting.remove(sequence)
        self.num_waiting_tokens -= sequence.num_prompt_tokens
        bisect.insort(self.running, sequence, key=_rank)
        sequence.is_running = True
        if not self._free_tails:
            self._free_tails.append(self._num_tails)
            self._num_tails += 1
        sequence.tail_page = self._free_tails.pop()

    def stop(self, sequence: Sequence) -> None:
        """Let a running sequence wait, without a tail page."""
        self.running.remove(sequence)
        self._free_tails.append(sequence.tail_page)
        self.add(sequence)
        sequence.is_running = False

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue."""
        if sequence.is_running:
            self._free_tails.append(sequence.tail_page)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_prompt_tokens
        sequence.is_running = False

    def check_integrity(self) -> None:
        """Check the order of both queues. Raises AssertionError."""
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_rank), "a queue is out of order"
        assert all(each.is_running for each in self.running), "a running sequence is not marked"
        assert not any(each.is_running for each in self.waiting), "a waiting sequence is marked"
        num_tokens = sum(each.num_prompt_tokens for each in self.waiting)
        assert num_tokens == self.num_waiting_tokens, "waiting tokens are miscounted"
        held = [*self._free_tails, *(each.tail_page for each in self.running)]
        assert sorted(held) == list(range(self._num_tails)), "a tail page is lost or shared"


class TokensFirstError(Exception):
    """The tokens of a launched step must be read before the next step is planned."""


@dataclass(frozen=True, slots=True)
class StepBuilder:
    """The queues and pages that a step is planned from, and its plan so far."""

    queues: Queues
    pages: SequencePages
    launched: Mapping[Sequence, Chunk] = field(default_factory=dict)  # of the step before
    plan: StepPlan = field(default_factory=StepPlan)
    _lent: dict[Sequence, int] = field(default_factory=dict)  # uncomputed tokens of shorter ones

    def lend_rank(self, waiting: Sequence, ahead: Sequence) -> None:
        """Let a prompt go before those that a sequence which waits for it would go before."""
        if waiting.request.priority == ahead.request.priority:
            self._lent[ahead] = min(self.num_ranked(ahead), waiting.num_uncomputed)

    def num_ranked(self, sequence: Sequence) -> int:
        """Return the uncomputed tokens of a prompt, or of the shortest one that waits for it."""
        num_left = self.num_left(sequence)
        return min(num_left, self._lent.get(sequence, num_left))

    def first(self, sequence: Sequence) -> int:
        """Return the position after the computed and the launched tokens of a sequence."""
        chunk = self.launched.get(sequence)
        return sequence.num_computed if chunk is None else chunk.end

    def num_left(self, sequence: Sequence) -> int:
        """Return the known tokens of a sequence that are neither computed nor launched."""
        return len(sequence.token_ids) - self.first(sequence)

    def is_in_prompt(self, sequence: Sequence) -> bool:
        """Return whether tokens are left of a running sequence, whose decode would be planned."""
        return sequence not in self.plan.chunks and self.num_left(sequence) > 0

    def add(self, chunk: Chunk) -> bool:
        """Add a chunk and allocate its pages, preempting the last sequences if needed.

        Reads from the lower store for later sequences end first: what they have read stays cached.

        Returns False if the chunk is empty or its own sequence was preempted. Raises
        TokensFirstError instead of preempting after a launched step.
        """
        sequence = chunk.sequence
        if chunk.num_tokens == 0:
            return False
        while not self.pages.allocate(sequence, chunk.end):
            if self.launched:
                raise TokensFirstError
            newest = self.queues.running[-1]
            if self.pages.end_a_read(newest.rank):
                continue
            self.preempt(newest)
            if newest is sequence:
                return False
        self.plan.chunks[sequence] = chunk
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages, and let it wait."""
        self.queues.stop(sequence)
        self.pages.release(sequence)
        self.plan.chunks.pop(sequence, None)
        self.plan.preempted.append(sequence)

    def change_tier(self, sequence: Sequence) -> bool:
        """Move a sequence to a higher tier if its known tokens exceed its tier.

        Returns True if its computed keys and values are no longer valid for it.
        """
        if len(sequence.token_ids) <= sequence.tier.ceiling:
            return False
        tier = sequence.request.tier_choice.tier_covering(len(sequence.token_ids))
        if tier.profile == sequence.tier.profile:
            sequence.tier = tier
            return False
        sequence.move_to(tier)
        self.plan.rescaled.append(sequence)
        return sequence.request.tier_choice.policy == "grow-exact"


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
