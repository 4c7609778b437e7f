"""The slots of sequences, for models whose layers keep a state of each sequence.

A running sequence has a slot of its own. Its state moves on with every token, so the states of a
prefix can only be shared where they were kept: a snapshot is a slot that is no longer written. It
is taken by writing the next tokens' state to another slot, and nothing is copied. Snapshots are
found by the keys of pages (`prefix_cache.py`), and evicted least recently used first, as pages are.

Snapshots are sparse, because a slot takes as much memory as thousands of tokens in pages. A prompt
has them at its last page boundary, every few thousand tokens, and where its pages leave those of
another prompt, which is cached or waits. An answer has one, at its newest page boundary.
"""

from collections.abc import Iterable, Iterator, Sequence

from ropewalk.model_runtime.scheduling.page_pool import PagePool
from ropewalk.model_runtime.scheduling.prefix_cache import Key, PrefixIndex
from ropewalk.model_runtime.scheduling.sequence import HeldState
from ropewalk.model_runtime.scheduling.sequence import Sequence as TokenSequence
from ropewalk.model_runtime.state_shape import StatePart

_SPARSE = 4096  # tokens of a prompt between two snapshots


class SequenceStates:
    """The owner of all slots."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self._sparse = max(1, _SPARSE // page_size) * page_size
        self.index = PrefixIndex()
        self.pool = PagePool(num_slots, self.index)
        self._draft_slot: int | None = None  # written by all drafts of a step; None: it has none

    def num_reusable(self, keys: Sequence[Key]) -> int:
        """Return the number of pages up to the deepest snapshot; `keys` are those of cached pages.

        It is 0 if no slot would be left for the sequence itself.
        """
        num_pages, slot = self._deepest(keys)
        if slot is not None and self.pool.num_available - self.pool.is_cached(slot) < 1:
            return 0
        return num_pages

    def start(self, sequence: TokenSequence, keys: Sequence[Key]) -> None:
        """Give a sequence its slot, and the snapshot that `num_reusable` found, if there is one.

        `keys`: those of the cached pages that it matches; the caller has checked `num_available`.
        """
        num_pages = self.num_reusable(keys)
        read = self._deepest(keys)[1] if num_pages else None
        if read is not None:
            self.pool.share([read])
        (own,) = self.pool.allocate(1)
        num_tokens = num_pages * self.page_size
        planned = self._planned(sequence, num_tokens, len(keys) * self.page_size)
        sequence.state = HeldState(own, read, planned, num_tokens)

    def parts(
        self, sequence: TokenSequence, num_tokens: int, num_drafted: int = 0
    ) -> tuple[StatePart, ...]:
        """Return the parts of the next tokens, which a step is about to compute.

        Where a snapshot is due, a slot is taken for it, unless sequences use all of them.
        `num_drafted`: tokens of a draft behind them, which leave the sequence's state alone.
        """
        held = sequence.state
        assert held is not None, "a sequence without a slot"
        parts, read, at = [], held.read, held.num_tokens
        end = at + num_tokens
        for position in self._due(sequence, held, at, end):
            if position > held.last_planned:
                self._drop_newest(held)  # its slot is free, and no other snapshot is evicted
            if self.pool.num_available:
                (slot,) = self.pool.allocate(1)
                held.pending.append((position, slot))
                parts.append(StatePart(position - at, read, slot))
                read, at = slot, position
        if at < end:
            parts.append(StatePart(end - at, read, held.own))
            read = held.own
        held.next, held.next_tokens = read, end
        if num_drafted:
            assert self._draft_slot is not None, "a draft without a slot"
            parts.append(StatePart(num_drafted, read, self._draft_slot, is_draft=True))
        return tuple(parts)

    def reserve_draft_slot(self) -> bool:
        """Take the slot that all drafts of a step write; return False if slots are short.

        Another one is left for a snapshot, which is worth more.
        """
        if self._draft_slot is None and self.pool.num_available > 1:
            (self._draft_slot,) = self.pool.allocate(1)
        return self._draft_slot is not None

    def free_draft_slot(self) -> None:
        """Free the slot of a step's drafts, which nothing reads, if it has one."""
        if self._draft_slot is not None:
            self.pool.release([self._draft_slot])
            self._draft_slot = None

    def verify_draft(self, sequence: TokenSequence, row: int) -> None:
        """Note the place of a sequence's draft in the flat row of the step that has run."""
        held = sequence.state
        assert held is not None, "a sequence without a slot"
        held.draft_row, held.draft_begin = row, held.next_tokens

    def right_parts(
        self, sequence: TokenSequence, num_tokens: int
    ) -> tuple[int, tuple[StatePart, ...]]:
        """Return the place in the step's flat row of right draft tokens, and their parts.

        They are those up to the first `num_tokens` of the sequence that its state does not have
        yet. `computed` follows.
        """
        held = sequence.state
        assert held is not None, "a sequence without a slot"
        row = held.draft_row + held.num_tokens - held.draft_begin
        return row, self.parts(sequence, num_tokens - held.num_tokens)

    def computed(self, sequence: TokenSequence) -> None:
        """Record that a step has computed the parts, and publish its snapshots."""
        held = sequence.state
        assert held is not None, "a sequence without a slot"
        let_go = [] if held.read in {None, held.own, held.next} else [held.read]
        for position, slot in held.pending:
            if sequence.is_cacheable:
                key = sequence.page_keys(position // self.page_size, self.page_size)[-1]
                self.index.publish(slot, key)
                if position > held.last_planned and self.index.match([key]) == [slot]:
                    held.newest = (slot, key)
            if slot != held.next:
                let_go.append(slot)
        held.pending.clear()
        held.read, held.num_tokens = held.next, held.next_tokens
        self.pool.release([slot for slot in let_go if slot is not None])

    def release(self, sequence: TokenSequence) -> None:
        """Release the slots of a sequence, which is computed again from a snapshot or its start."""
        held, sequence.state = sequence.state, None
        if held is not None:
            self.pool.release(held.slots())

    def keys_in_flight(self, sequence: TokenSequence) -> list[Key]:
        """Return the keys at which a running sequence has yet to take snapshots."""
        held = sequence.state
        if held is None or not sequence.is_cacheable:
            return []
        sizes = [each // self.page_size for each in held.planned if each > sequence.num_computed]
        keys = sequence.page_keys(max(sizes, default=0), self.page_size)
        return [keys[size - 1] for size in sizes]

    def plan_junction(
        self, running: Iterable[TokenSequence], keys: Sequence[Key], num_found: int
    ) -> TokenSequence | None:
        """Let a running prompt take a snapshot where a waiting one leaves it; return the former.

        `keys`: those of the waiting prompt's pages, of which `num_found` are before a snapshot.
        None: no running sequence has yet to compute a longer beginning of the prompt.
        """
        best, deepest = None, num_found
        for sequence in running:
            held = sequence.state
            if held is None or not sequence.is_cacheable:
                continue
            if held.last_planned <= max(sequence.num_computed, deepest * self.page_size):
                continue
            own = sequence.page_keys(held.last_planned // self.page_size, self.page_size)
            num_common = _num_common(keys, own)
            if num_common > max(sequence.num_computed // self.page_size, deepest):
                best, deepest = sequence, num_common
        if best is not None and best.state is not None:
            best.state.plan(deepest * self.page_size)
        return best

    def invalidate(self) -> None:
        """Forget all snapshots."""
        self.pool.drop_cached()
        self.index.clear()

    def check_integrity(self, running: Iterable[TokenSequence]) -> None:
        """Check that exactly the used slots are held. Raises AssertionError."""
        self.pool.check_integrity()
        assert self._draft_slot is None, "a draft's slot is held between two steps"
        ref_counts = [0] * self.pool.num_pages
        for sequence in running:
            assert sequence.state is not None, "a running sequence has no slot"
            for slot in sequence.state.slots():
                ref_counts[slot] += 1
        assert ref_counts == self.pool.ref_counts, "a slot's ref count is not its holders'"

    def _deepest(self, keys: Sequence[Key]) -> tuple[int, int | None]:
        """Return the number of pages before the deepest snapshot, and its slot."""
        for num_pages in range(len(keys), 0, -1):
            found = self.index.match([keys[num_pages - 1]])
            if found:
                return num_pages, found[0]
        return 0, None

    def _planned(self, sequence: TokenSequence, begin: int, junction: int) -> list[int]:
        """Return the positions of a sequence's snapshots, beyond `begin`, ascending.

        `junction`: the position where its pages leave those that are cached.
        """
        size = self.page_size
        last = min(len(sequence.token_ids) - 1, sequence.num_sharable) // size * size
        sparse = range(0, last, self._sparse)
        return sorted({each for each in (*sparse, junction, last) if begin < each <= last})

    def _due(self, sequence: TokenSequence, held: HeldState, begin: int, end: int) -> Iterator[int]:
        """Yield the positions of snapshots after `begin`, up to `end`."""
        if not sequence.is_cacheable:
            return
        for position in held.planned:
            if begin < position <= end:
                yield position
        newest = end // self.page_size * self.page_size
        if begin < newest <= sequence.num_sharable and newest > held.last_planned:
            yield newest

    def _drop_newest(self, held: HeldState) -> None:
        """Free an answer's newest snapshot, which gets a later one, if nothing reads it."""
        if held.newest is None:
            return
        slot, key = held.newest
        held.newest = None
        if self.index.match([key]) == [slot] and self.pool.is_cached(slot):
            self.pool.drop(slot)


def _num_common(keys: Sequence[Key], others: Sequence[Key]) -> int:
    """Return the number of first keys that are equal; each is made from the one before it."""
    first, end = 0, min(len(keys), len(others))
    while first < end:
        middle = (first + end) // 2
        if keys[middle] == others[middle]:
            first = middle + 1
        else:
            end = middle
    return first
