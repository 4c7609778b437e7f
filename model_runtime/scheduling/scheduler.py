"""The choice of tokens for the next step. Plain Python: it can be tested in milliseconds.

Decodes go first, one token each. The rest of the token budget goes to prefill in chunks. The
prompts with the fewest uncomputed tokens go first, so a short prompt does not wait for a long one.
A quarter of the prefill budget is reserved for the oldest prompt, so the longest prompt completes.

Pages are allocated as they are needed. If none are left, the running sequence that arrived last is
preempted, so a sequence that arrived earlier can continue. The preempted sequence returns to its
old place in the queue and is computed again later. The oldest sequence is therefore never
preempted, and a request that fits the cache alone always finishes.
"""

import bisect
from dataclasses import dataclass, field

from model_runtime.cache.page_pool import PagePool
from model_runtime.cache.prefix_cache import Key, PrefixIndex
from model_runtime.config import EngineConfig
from model_runtime.scheduling.sequence import Sequence
from rope import Tier

_SHARE_OF_OLDEST = 0.25  # of a step's prefill, even if shorter prompts wait


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that the next step computes."""

    sequence: Sequence
    num_tokens: int
    tier: Tier  # its table rotates these tokens and the cached keys before them

    @property
    def first(self) -> int:
        """Return the position of the first token."""
        return self.sequence.num_computed

    @property
    def is_last(self) -> bool:
        """Return whether the chunk ends at the last known token, so that a new one is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed

    @property
    def is_scored(self) -> bool:
        """Return whether logprobs of its prompt tokens are requested and not yet delivered."""
        sequence = self.sequence
        wanted = sequence.request.sampling.prompt_logprobs is not None
        return wanted and max(self.first, sequence.num_scored) < sequence.num_prompt_tokens

    @property
    def num_logit_rows(self) -> int:
        """Return the number of logit rows that scoring its tokens takes."""
        first = max(self.first, self.sequence.num_scored)
        return max(0, self.first + self.num_tokens - first) if self.is_scored else 0


@dataclass(slots=True)
class Plan:
    """One step, with the preemptions and tier changes that it required."""

    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    rescaled: list[Sequence] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        """Return the number of prefill tokens, including answers that are computed again.

        The value is valid until the step has run.
        """
        return sum(
            chunk.num_tokens for sequence, chunk in self.chunks.items() if not sequence.is_decoding
        )


class Scheduler:
    """The owner of the two queues, the page pool and the prefix index."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.index = PrefixIndex()
        self.pool = PagePool(config.num_pages, self.index)
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self._num_arrived = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the cache alone (checked at admission)."""
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)

    def schedule(
        self, *, starts_waiting: bool = True, num_prefill_tokens: int | None = None
    ) -> Plan:
        """Plan the next step. The plan has no chunks if no sequence waits or runs.

        `starts_waiting`: False after a step that ran out of memory; its retry has fewer sequences.
        `num_prefill_tokens`: maximum within max_num_batched_tokens; None: no other limit.
        """
        plan = Plan()
        for sequence in list(self.running):
            # An earlier sequence of this loop may have preempted this one.
            if sequence in self.running and sequence.is_decoding:
                if self._cross(sequence, plan):
                    # It is computed again from the start, under the new table and on other pages.
                    self.pool.release(sequence.forget_computed())
                    self._read_prefix(sequence)
                if sequence.is_decoding:
                    tier = sequence.tier_at(sequence.num_computed)
                    self._take(Chunk(sequence, 1, tier), plan)
        if starts_waiting:
            self._start_waiting(plan)
        tokens_left = self._config.max_num_batched_tokens - len(plan.chunks)
        if num_prefill_tokens is not None:
            tokens_left = min(tokens_left, num_prefill_tokens)
        self._prefill(tokens_left, plan)
        return plan

    @property
    def num_decodes(self) -> int:
        """Return the number of running sequences that are decoding."""
        return sum(sequence.is_decoding for sequence in self.running)

    def computed(self, chunk: Chunk) -> None:
        """Record that a step has computed this chunk, and publish its full pages."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.num_tokens
        size = self._config.page_size
        num_full = min(sequence.num_computed, sequence.num_one_profile) // size
        if sequence.is_trusted and num_full > sequence.num_published:
            keys = sequence.page_keys(num_full, size)
            for at in range(sequence.num_published, num_full):
                self.index.publish(sequence.pages[at], keys[at])
            sequence.num_published = num_full

    def distrust_cache(self) -> None:
        """Clear the prefix cache after a NaN, because its other readers are not known.

        Pages are published before the logits show a NaN, so pages computed from them may be bad
        too. Running sequences keep the pages they hold, but publish no more of them.
        """
        self.pool.drop_kept()
        self.index.clear()
        for sequence in self.running:
            sequence.is_trusted = False

    def preempt_newest(self) -> Sequence | None:
        """Preempt the newest sequence after a step that ran out of memory.

        Returns None if fewer than two sequences run.
        """
        if len(self.running) < 2:
            return None
        newest = self.running[-1]
        self._preempt(newest, Plan())
        return newest

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and release its pages."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.pool.release(sequence.forget_computed())

    def check_integrity(self) -> None:
        """Check page ref counts and the order of the queues. Raises AssertionError."""
        self.pool.check_integrity()
        holders = [0] * self.pool.num_pages
        for sequence in self.running:
            assert len(sequence.pages) * self._config.page_size >= sequence.num_computed
            for page in sequence.pages:
                holders[page] += 1
        assert holders == self.pool._num_holders, "a page is held by nobody, or by a stranger"  # noqa: SLF001
        assert not any(sequence.pages for sequence in self.waiting), "a waiting one holds pages"
        assert len(self.running) <= self._config.max_num_seqs, "too many sequences run"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_arrival), "a queue is out of order"

    def _cross(self, sequence: Sequence, plan: Plan) -> bool:
        """Move a growing sequence to a higher tier if its known tokens exceed its tier.

        Returns True if its computed keys and values are no longer valid for it.
        """
        placement = sequence.request.placement
        if placement.policy not in ("grow", "grow-exact"):
            return False
        tier = placement.tier_covering(len(sequence.token_ids))
        if tier.profile == sequence.tier.profile:
            sequence.tier = tier
            return False
        sequence.cross(tier)
        plan.rescaled.append(sequence)
        return placement.policy == "grow-exact"

    def _prefill(self, tokens_left: int, plan: Plan) -> None:
        """Split the token budget among the prompts in prefill."""
        reading = [sequence for sequence in self.running if not sequence.is_decoding]
        if not reading or tokens_left <= 0:
            return
        oldest, *others = reading
        others.sort(key=lambda sequence: (sequence.num_uncomputed, sequence.arrival))
        needed = (each.num_uncomputed for each in others)
        of_others = sum(each for each in needed if each < oldest.num_uncomputed)
        kept_back = min(of_others, int(tokens_left * (1 - _SHARE_OF_OLDEST)))
        rows_left = self._config.max_num_logit_rows
        # The oldest comes again at the end: the limit on logit rows may leave tokens unused.
        for sequence in (oldest, *others, oldest):
            if sequence not in self.running or not tokens_left:
                continue  # an earlier chunk preempted it, or used the last token
            given = plan.chunks.get(sequence)
            tokens, rows = (given.num_tokens, given.num_logit_rows) if given else (0, 0)
            most = tokens + tokens_left - kept_back
            chunk = self._prefill_chunk(sequence, most, rows + rows_left)
            kept_back = 0
            if self._take(chunk, plan):
                tokens_left -= chunk.num_tokens - tokens
                rows_left -= chunk.num_logit_rows - rows

    def _prefill_chunk(self, sequence: Sequence, tokens_left: int, rows_left: int) -> Chunk:
        first = sequence.num_computed
        tier = sequence.tier_at(first)
        # A sequence that is computed again goes through the same tiers as before.
        num_tokens = min(sequence.num_uncomputed, tokens_left, max(tier.ceiling - first, 1))
        chunk = Chunk(sequence, num_tokens, tier)
        if chunk.is_scored:
            # Every scored token needs a row of logits, the largest tensor of a step.
            num_unscored = max(0, sequence.num_scored - first)
            chunk = Chunk(sequence, min(num_tokens, num_unscored + rows_left), tier)
        return chunk

    def _start_waiting(self, plan: Plan) -> None:
        coming = self._coming_keys()
        for sequence in list(self.waiting):
            if len(self.running) >= self._config.max_num_seqs:
                return
            if sequence.awaited_key in coming:
                continue
            self._cross(sequence, plan)  # if it was preempted just before
            keys = self._readable_keys(sequence)
            found = self.index.match(keys)
            if len(found) < len(keys) and keys[len(found)] in coming:
                # Another sequence is computing its prefix; wait until those pages can be shared.
                sequence.awaited_key = keys[len(found)]
                continue
            num_pages = self._num_pages(len(sequence.token_ids)) - len(found)
            num_kept = sum(self.pool.is_kept(page) for page in found)
            if num_pages + num_kept + self._num_promised() > self.pool.num_available:
                return  # no later sequence starts before the first that does not fit
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=_arrival)
            self._read_prefix(sequence)
            coming |= set(self._keys_to_come(sequence))

    def _read_prefix(self, sequence: Sequence) -> None:
        """Assign to a sequence the cached pages that match its known tokens."""
        found = self.index.match(self._readable_keys(sequence))
        self.pool.share(found)
        sequence.pages = list(found)
        sequence.num_published = len(found)
        sequence.num_computed = len(found) * self._config.page_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed

    def _readable_keys(self, sequence: Sequence) -> list[Key]:
        """Return the keys of the pages it could read: all but the last token, under one profile."""
        wants_logits = sequence.request.sampling.prompt_logprobs is not None
        if wants_logits and sequence.num_scored < sequence.num_prompt_tokens:
            return []  # cached positions have no logits
        length = min(len(sequence.token_ids) - 1, sequence.num_one_profile)
        size = self._config.page_size
        return sequence.page_keys(length // size, size)

    def _num_promised(self) -> int:
        """Return the number of pages that running sequences still need for their known tokens."""
        return sum(
            self._num_pages(len(sequence.token_ids)) - len(sequence.pages)
            for sequence in self.running
        )

    def _keys_to_come(self, sequence: Sequence) -> list[Key]:
        """Return the keys of the full pages that a running sequence has yet to publish."""
        size = self._config.page_size
        num_full = min(len(sequence.token_ids), sequence.num_one_profile) // size
        if num_full <= sequence.num_published or not sequence.is_trusted:
            return []
        return sequence.page_keys(num_full, size)[sequence.num_published :]

    def _coming_keys(self) -> set[Key]:
        if not self.waiting:
            return set()
        return {key for sequence in self.running for key in self._keys_to_come(sequence)}

    def _take(self, chunk: Chunk, plan: Plan) -> bool:
        """Add a chunk to the plan and allocate its pages, preempting later arrivals if needed.

        Returns False if the chunk is empty or its own sequence was preempted.
        """
        sequence = chunk.sequence
        if chunk.num_tokens == 0:
            return False
        needed = self._num_pages(chunk.first + chunk.num_tokens) - len(sequence.pages)
        while needed > self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.pages += self.pool.allocate(max(needed, 0))
        plan.chunks[sequence] = chunk
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.forget_computed())
        bisect.insort(self.waiting, sequence, key=_arrival)
        plan.chunks.pop(sequence, None)
        plan.preempted.append(sequence)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.page_size)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
