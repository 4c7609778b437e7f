"""The choice of tokens for the next step. Plain Python: it can be tested in milliseconds.

Decodes go first, one token each. The rest of the token budget goes to prefill in chunks
(`prefill.py`).

Sequences are ranked by priority (a lower number is earlier), then by arrival. Pages are allocated
as they are needed. If none are left, the running sequence of the last rank is preempted, so an
earlier one can continue (`step_builder.py`). The preempted sequence returns to its old place in the
queue and is computed again later. The first sequence is therefore never preempted. A request that
fits the cache alone always finishes, unless requests of an earlier priority come without end.
"""

from collections.abc import Callable

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.scheduling.prefill import plan_prefill, start_waiting
from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.model_runtime.scheduling.sequence_pages import SequencePages
from ropewalk.model_runtime.scheduling.step_builder import Queues, StepBuilder, TokensFirstError
from ropewalk.model_runtime.scheduling.step_plan import Chunk, StepPlan


def plan_decodes(step: StepBuilder) -> None:
    """Add the next token of every decoding sequence, oldest first.

    If `grow-exact` changes a sequence's tier, then its keys and values are computed again from the
    start, under the new table and on other pages. The sequence is in prefill from then on.
    """
    for sequence in list(step.queues.running):
        # An earlier sequence of this loop may have preempted this one.
        if not (sequence.is_running and sequence.is_decoding):
            continue
        # Compared here, because a call for each sequence of each step is not free.
        if len(sequence.token_ids) > sequence.tier.ceiling and step.change_tier(sequence):
            step.pages.release(sequence)
            step.pages.reuse_prefix(sequence)
            if not sequence.is_decoding:
                continue
        # Its newest token has the tier that is in force for the whole sequence.
        step.add(Chunk(sequence, sequence.num_computed, 1, sequence.tier, is_decode=True))


def plan_unknown(step: StepBuilder) -> None:
    """Add the decodes that follow a launched step. It has yet to compute their tokens.

    That step may end a sequence by an end token or a stop string. Its decode here then computes a
    token too many, which is never delivered. A sequence that reaches max_tokens has none. Raises
    TokensFirstError if a sequence changes its tier.
    """
    for sequence in step.queues.running:
        before = step.launched.get(sequence)
        if before is None or not before.is_last or _is_at_max_tokens(sequence):
            continue
        if len(sequence.token_ids) + 1 > sequence.tier.ceiling:
            raise TokensFirstError
        step.add(Chunk(sequence, before.end, 1, sequence.tier, is_decode=True))


def _is_at_max_tokens(sequence: Sequence) -> bool:
    """Return whether the token that is being computed is the last one."""
    return sequence.num_generated + 1 >= sequence.request.sampling.max_tokens


class Scheduler:
    """The owner of the two queues and of all pages."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._queues = Queues()
        self.waiting = self._queues.waiting  # both by priority, then by arrival
        self.running = self._queues.running
        self.pages = SequencePages(
            config.num_pages,
            config.page_size,
            config.max_num_batched_tokens,
            config.num_state_slots,
            config.page_groups.windows,
        )
        self.pool = self.pages.pool
        self._num_arrived = 0
        self._is_full = False  # no waiting sequence can start before a running one ends
        # Whether a step with prompts that failed half-way cannot simply run again.
        self.restarts_all = self.pages.states is not None or config.quantises_pages
        # Fewer after such a step ran out of memory, until a sequence ends.
        self._most_running = config.max_num_seqs

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the cache alone (checked at admission)."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._queues.add(sequence)
        self._is_full = False

    def schedule(
        self,
        *,
        starts_waiting: bool = True,
        num_prefill_tokens: Callable[[int], int] | None = None,
    ) -> StepPlan:
        """Plan the next step. The plan has no chunks if no sequence waits or runs.

        `starts_waiting`: False after a step that ran out of memory; its retry has fewer sequences.
        `num_prefill_tokens`: returns the maximum within max_num_batched_tokens beside so many
        decodes; None: no other limit.
        """
        step = StepBuilder(self._queues, self.pages)
        plan_decodes(step)
        most = self._most_running if starts_waiting or self.restarts_all else 0
        if most and self.waiting:
            if self.pages.lower_store is not None:
                self.pages.lower_store.collect(is_busy=bool(self.running))
            self._is_full = start_waiting(step, most)
        self._plan_prefill(step, num_prefill_tokens)
        if step.plan.preempted or not starts_waiting:
            self._is_full = False  # not known
        return step.plan

    def _plan_prefill(
        self, step: StepBuilder, num_prefill_tokens: Callable[[int], int] | None
    ) -> None:
        """Add the chunks of prompts to a step that has its decodes."""
        num_decodes = len(step.plan.chunks)
        tokens_left = self._config.max_num_batched_tokens - num_decodes
        if num_prefill_tokens is not None:
            tokens_left = min(tokens_left, num_prefill_tokens(num_decodes))
        plan_prefill(step, tokens_left, self._config.max_num_logit_rows)

    def following(
        self, plan: StepPlan, num_prefill_tokens: Callable[[int], int] | None = None
    ) -> StepPlan | None:
        """Plan the step after a launched one; None: the tokens of that one come first.

        They do if a request waits that could start now, if a sequence changes its tier, or if the
        pages do not suffice without preemption. Pages that were allocated until then stay so.
        They also do if a prompt goes on while there is room for another request. A request that
        arrives during the launched step would wait for the long chunk behind it, too.
        """
        if self.waiting and not self._is_full:
            return None
        step = StepBuilder(self._queues, self.pages, plan.chunks)
        has_room = not self.waiting and len(self.running) < self._most_running
        try:
            plan_unknown(step)
            if len(step.plan.chunks) < len(self.running):
                if (has_room or self.restarts_all) and any(map(step.is_in_prompt, self.running)):
                    return None
                self._plan_prefill(step, num_prefill_tokens)
        except TokensFirstError:
            return None
        return step.plan if step.plan.chunks else None

    def computed(self, chunk: Chunk) -> None:
        """Record that a step has computed this chunk, and publish its full pages."""
        chunk.sequence.num_computed += chunk.num_tokens
        if self.pages.states is not None:
            self.pages.states.computed(chunk.sequence)
        self.pages.publish(chunk.sequence)
        self.pages.drop_unread(chunk.sequence)

    def decoded(self, sequence: Sequence) -> None:
        """Record that a step has computed one token of a sequence, as `computed` does."""
        sequence.num_computed += 1
        if self.pages.states is not None:
            self.pages.states.computed(sequence)
        if sequence.num_computed % self.pages.page_size == 0:  # else no other page is full
            self.pages.publish(sequence)
            self.pages.drop_unread(sequence)

    def invalidate_prefix_cache(self) -> None:
        """Clear the prefix cache after a NaN, because its other readers are not known.

        Pages are published before the logits show a NaN, so pages computed from them may be bad
        too. Running sequences keep the pages they hold, but publish no more of them.
        """
        self.pages.invalidate_prefix_cache(self.running)

    def make_room(self) -> list[Sequence]:
        """Preempt the newest sequence after a step that ran out of memory, and return it.

        If the model keeps states, or the cache quantises pages, then all sequences are preempted.
        Some layers of the step may have advanced their states already, or begun their next tail
        pages. All but one sequence start again, and no more than that run until one ends. Nothing
        is preempted if fewer than two sequences run.
        """
        if len(self.running) < 2:
            return []
        self._is_full = False
        if self.restarts_all:
            self._most_running = len(self.running) - 1
        preempted = list(self.running) if self.restarts_all else self.running[-1:]
        builder = StepBuilder(self._queues, self.pages)
        for sequence in preempted:
            builder.preempt(sequence)
        return preempted

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue, and release what it holds."""
        self._queues.remove(sequence)
        self.pages.release(sequence)
        if self.pages.lower_store is not None:
            self.pages.lower_store.cancel(sequence)
        self._is_full = False
        self._most_running = self._config.max_num_seqs

    @property
    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens of the sequences that wait."""
        return self._queues.num_waiting_tokens

    def check_integrity(self) -> None:
        """Check page ref counts and the order of the queues. Raises AssertionError."""
        self.pages.check_integrity(self.running)
        assert not any(sequence.pages for sequence in self.waiting), "a waiting sequence has pages"
        assert len(self.running) <= self._config.max_num_seqs, "too many sequences run"
        self._queues.check_integrity()
