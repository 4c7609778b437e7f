"""Which tokens the next step computes. Plain Python: it can be tested in milliseconds.

Decodes go first, one token each; what is left of the token budget goes to prefill in chunks, to
the prompts that have least left to read, so that a short one does not wait for a long one's end. A
quarter is the oldest prompt's in any case, so that the longest is read to its end.

Pages are taken as they are needed. When there are none left, the running sequence that arrived last
gives up all of its own, so that one which arrived earlier can go on; it waits at its old place and
is computed again later. The oldest is therefore never interrupted, and a request that fits the
cache alone is always finished.
"""

import bisect
from dataclasses import dataclass, field

from model_runtime.cache.page_pool import PagePool
from model_runtime.cache.prefix_cache import Key, PrefixIndex
from model_runtime.config import EngineConfig
from model_runtime.scheduling.sequence import Sequence
from rope import Tier

_SHARE_OF_OLDEST = 0.25  # of a step's prefill, whatever shorter prompts wait


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that the next step computes."""

    sequence: Sequence
    num_tokens: int
    tier: Tier  # whose table they are computed and everything before them is read under

    @property
    def first(self) -> int:
        """Position of its first token."""
        return self.sequence.num_computed

    @property
    def is_last(self) -> bool:
        """Whether it reaches the end of the known tokens, so that a new one can be chosen."""
        return self.num_tokens == self.sequence.num_uncomputed

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of its prompt tokens are wanted and not yet delivered."""
        sequence = self.sequence
        wanted = sequence.request.sampling.prompt_logprobs is not None
        return wanted and max(self.first, sequence.num_scored) < sequence.num_prompt_tokens

    @property
    def num_logit_rows(self) -> int:
        """Rows of logits that scoring its tokens takes."""
        first = max(self.first, self.sequence.num_scored)
        return max(0, self.first + self.num_tokens - first) if self.is_scored else 0


@dataclass(slots=True)
class Plan:
    """One step, and what had to happen for it."""

    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    rescaled: list[Sequence] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, or of answers that are computed again; known until it is run."""
        return sum(
            chunk.num_tokens for sequence, chunk in self.chunks.items() if not sequence.is_decoding
        )


class Scheduler:
    """Owner of the two queues, the page pool and the prefix index."""

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
        """The next step; no chunks when nothing waits or runs.

        `starts_waiting`: False after a step that ran out of memory, which is tried with fewer.
        `num_prefill_tokens`: at most so many, within max_num_batched_tokens; None: no other limit.
        """
        plan = Plan()
        for sequence in list(self.running):
            # Each of these may have been preempted for one before it.
            if sequence in self.running and sequence.is_decoding:
                if self._cross(sequence, plan):
                    # Computed again from the start under the new table, on other pages.
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
        """Sequences that are past their prompts."""
        return sum(sequence.is_decoding for sequence in self.running)

    def computed(self, chunk: Chunk) -> None:
        """A step has computed this chunk; its full pages may be shared from now on."""
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
        """Let nobody find any page any more: a NaN was seen, and who else read it is not known.

        Pages are published before logits show what is in them, so their descendants may be ill
        too. Running sequences keep the pages they hold, but offer no more of them.
        """
        self.pool.drop_kept()
        self.index.clear()
        for sequence in self.running:
            sequence.is_trusted = False

    def preempt_newest(self) -> Sequence | None:
        """Make room after a step that ran out of memory; None when only one runs."""
        if len(self.running) < 2:
            return None
        newest = self.running[-1]
        self._preempt(newest, Plan())
        return newest

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and take its pages back."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self.pool.release(sequence.forget_computed())

    def check_integrity(self) -> None:
        """Pages are held by whom they should be, and queues are in order. AssertionError."""
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
        """Move a growing sequence up when its known tokens are beyond its tier.

        True: what it has computed so far does not serve it any more.
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
        """Share the budget out among the prompts that are being read."""
        reading = [sequence for sequence in self.running if not sequence.is_decoding]
        if not reading or tokens_left <= 0:
            return
        oldest, *others = reading
        others.sort(key=lambda sequence: (sequence.num_uncomputed, sequence.arrival))
        needed = (each.num_uncomputed for each in others)
        of_others = sum(each for each in needed if each < oldest.num_uncomputed)
        kept_back = min(of_others, int(tokens_left * (1 - _SHARE_OF_OLDEST)))
        rows_left = self._config.max_num_logit_rows
        # What the others leave, for there are only so many rows of logits, is the oldest's again.
        for sequence in (oldest, *others, oldest):
            if sequence not in self.running or not tokens_left:
                continue  # preempted for one before it, or too late
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
        # A sequence that is rebuilt goes from tier to tier as it did before.
        num_tokens = min(sequence.num_uncomputed, tokens_left, max(tier.ceiling - first, 1))
        chunk = Chunk(sequence, num_tokens, tier)
        if chunk.is_scored:
            # A row of logits for every token to be scored: the largest tensor of a step.
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
                # Somebody is computing its prefix: share it when it is there.
                sequence.awaited_key = keys[len(found)]
                continue
            num_pages = self._num_pages(len(sequence.token_ids)) - len(found)
            num_kept = sum(self.pool.is_kept(page) for page in found)
            if num_pages + num_kept + self._num_promised() > self.pool.num_available:
                return  # the first that does not fit is not overtaken
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=_arrival)
            self._read_prefix(sequence)
            coming |= set(self._keys_to_come(sequence))

    def _read_prefix(self, sequence: Sequence) -> None:
        """Give a sequence the cached pages that its known tokens begin with."""
        found = self.index.match(self._readable_keys(sequence))
        self.pool.share(found)
        sequence.pages = list(found)
        sequence.num_published = len(found)
        sequence.num_computed = len(found) * self._config.page_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed

    def _readable_keys(self, sequence: Sequence) -> list[Key]:
        """Keys of the pages it could read: all but the last token, under one profile."""
        wants_logits = sequence.request.sampling.prompt_logprobs is not None
        if wants_logits and sequence.num_scored < sequence.num_prompt_tokens:
            return []  # cached positions have none
        length = min(len(sequence.token_ids) - 1, sequence.num_one_profile)
        size = self._config.page_size
        return sequence.page_keys(length // size, size)

    def _num_promised(self) -> int:
        """Pages that running sequences still need for the tokens they already have."""
        return sum(
            self._num_pages(len(sequence.token_ids)) - len(sequence.pages)
            for sequence in self.running
        )

    def _keys_to_come(self, sequence: Sequence) -> list[Key]:
        """Keys of the pages that a running sequence is about to compute."""
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
        """Put a chunk into the plan with the pages it needs, at the cost of later arrivals."""
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
