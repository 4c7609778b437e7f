"""The choice of tokens for the next step. Plain Python: it can be tested in milliseconds.

Decodes go first, one token each (`decode.py`). The rest of the token budget goes to prefill in
chunks (`prefill.py`).

Sequences are ranked by priority (a lower number is earlier), then by arrival. Pages are allocated
as they are needed. If none are left, the running sequence of the last rank is preempted, so an
earlier one can continue (`step_builder.py`). The preempted sequence returns to its old place in the
queue and is computed again later. The first sequence is therefore never preempted. A request that
fits the cache alone always finishes, unless requests of an earlier priority come without end.
"""

from model_runtime.config import EngineConfig
from model_runtime.scheduling.decode import plan_decodes
from model_runtime.scheduling.following import plan_following
from model_runtime.scheduling.prefill import plan_prefill, start_waiting
from model_runtime.scheduling.sequence import Sequence
from model_runtime.scheduling.sequence_pages import SequencePages
from model_runtime.scheduling.step_builder import Queues, StepBuilder
from model_runtime.scheduling.step_plan import Chunk, StepPlan


class Scheduler:
    """The owner of the two queues and of all pages."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._queues = Queues()
        self.waiting = self._queues.waiting  # both by priority, then by arrival
        self.running = self._queues.running
        self.pages = SequencePages(
            config.num_pages, config.page_size, config.max_num_batched_tokens
        )
        self.pool = self.pages.pool
        self._num_arrived = 0
        self._is_full = False  # no waiting sequence can start before a running one ends

    @property
    def num_decodes(self) -> int:
        return [sequence.is_decoding for sequence in self.running].count(True)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the cache alone (checked at admission)."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._queues.add(sequence)
        self._is_full = False

    def schedule(
        self, *, starts_waiting: bool = True, num_prefill_tokens: int | None = None
    ) -> StepPlan:
        """Plan the next step. The plan has no chunks if no sequence waits or runs.

        `starts_waiting`: False after a step that ran out of memory; its retry has fewer sequences.
        `num_prefill_tokens`: maximum within max_num_batched_tokens; None: no other limit.
        """
        step = StepBuilder(self._queues, self.pages)
        plan_decodes(step)
        if starts_waiting and self.waiting:
            self._is_full = start_waiting(step, self._config.max_num_seqs)
        tokens_left = self._config.max_num_batched_tokens - len(step.plan.chunks)
        if num_prefill_tokens is not None:
            tokens_left = min(tokens_left, num_prefill_tokens)
        plan_prefill(step, tokens_left, self._config.max_num_logit_rows)
        if step.plan.preempted or not starts_waiting:
            self._is_full = False  # not known
        return step.plan

    def following(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after decodes that the device still runs; None: their tokens come first."""
        return None if self.waiting and not self._is_full else plan_following(plan, self.pages)

    def computed(self, chunk: Chunk) -> None:
        """Record that a step has computed this chunk, and publish its full pages."""
        chunk.sequence.num_computed += chunk.num_tokens
        self.pages.publish(chunk.sequence)
        self.pages.drop_unread(chunk.sequence)

    def decoded(self, sequence: Sequence) -> None:
        """Record that a step has computed one token of a sequence, as `computed` does."""
        sequence.num_computed += 1
        if sequence.num_computed % self.pages.page_size == 0:  # else no other page is full
            self.pages.publish(sequence)
            self.pages.drop_unread(sequence)

    def invalidate_prefix_cache(self) -> None:
        """Clear the prefix cache after a NaN, because its other readers are not known.

        Pages are published before the logits show a NaN, so pages computed from them may be bad
        too. Running sequences keep the pages they hold, but publish no more of them.
        """
        self.pages.invalidate_prefix_cache(self.running)

    def preempt_newest(self) -> Sequence | None:
        """Preempt the newest sequence after a step that ran out of memory.

        Returns None if fewer than two sequences run.
        """
        if len(self.running) < 2:
            return None
        newest = self.running[-1]
        self._is_full = False
        StepBuilder(self._queues, self.pages).preempt(newest)
        return newest

    def remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        self.pages.release(sequence)
        self._is_full = False

    def check_integrity(self) -> None:
        """Check page ref counts and the order of the queues. Raises AssertionError."""
        self.pages.check_integrity(self.running)
        assert not any(sequence.pages for sequence in self.waiting), "a waiting sequence has pages"
        assert len(self.running) <= self._config.max_num_seqs, "too many sequences run"
        self._queues.check_integrity()
