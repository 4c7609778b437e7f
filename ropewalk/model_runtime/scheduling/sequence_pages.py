"""The pages of sequences: allocation, and prefixes that sequences share through the cache."""

from collections.abc import Iterable

from ropewalk.model_runtime.page_groups import pages_of_window
from ropewalk.model_runtime.scheduling.lower_pages import LowerPages
from ropewalk.model_runtime.scheduling.page_pool import PagePool
from ropewalk.model_runtime.scheduling.prefix_cache import Key, PrefixIndex, group_key
from ropewalk.model_runtime.scheduling.sequence import HOLE, Kept, Sequence, most_pages
from ropewalk.model_runtime.scheduling.sequence_states import SequenceStates


class SequencePages:
    """The owner of the page pool and the prefix index."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_chunk: int,
        num_state_slots: int = 0,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        """Own `num_pages` pages; a step computes at most `max_chunk` tokens of a sequence.

        `num_state_slots`: those of a model with states; 0: the model has none.
        `windows`: keys that each group of layers reads (page_groups.py); None: all.
        """
        self.num_groups = len(windows)
        self._windows = windows
        self._has_windows = any(windows)
        self.states = SequenceStates(num_state_slots, page_size) if num_state_slots else None
        self.page_size = page_size
        self._max_chunk = max_chunk
        self.index = PrefixIndex()
        self.pool = PagePool(num_pages, self.index)
        self.lower_store: LowerPages | None = None  # None: evicted pages are lost
        self._detained: list[list[int]] | None = None  # None: pages are released at once

    @property
    def layout(self) -> tuple[tuple[int | None, ...], int]:
        """Return the keys that each group of layers reads, None: all, and the size of a page."""
        return self._windows, self.page_size

    def num_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the pages that the first `num_tokens` tokens need beside those that are there."""
        num_pages = -(-num_tokens // self.page_size) * self.num_groups
        return max(0, num_pages - len(sequence.pages))

    def num_per_group(self, pages: list[int]) -> int:
        """Return how many pages of each group a page table has."""
        return len(pages) // self.num_groups

    def num_to_hold(self, sequence: Sequence) -> int:
        """Return the number of pages that the sequence still needs for its known tokens.

        Pages that it releases while it runs count once. A page of a window that another sequence
        holds, too, is not free after its release, so it does not count as held.
        """
        needed = self.num_needed(sequence, len(sequence.token_ids))
        most = most_pages(sequence.request.tier_choice, self.page_size, self._max_chunk)
        if not needed or (most is None and not self._has_windows):
            return needed
        needed //= self.num_groups
        total = 0
        for group, window in enumerate(self._windows):
            most_here = self._most_here(most, window)
            if most_here is None:
                total += needed
                continue
            held = [page for page in sequence.pages[group :: self.num_groups] if page != HOLE]
            if window is not None:
                held = [page for page in held if self.pool.ref_counts[page] == 1]
            total += min(needed, max(0, most_here - len(held)))
        return total

    def _most_here(self, most: int | None, window: int | None) -> int | None:
        """Return the most pages that a group holds of a sequence; `most`: without a window."""
        if window is None:
            return most
        return pages_of_window(window, self.page_size, self._max_chunk)

    def num_reserved(self, running: Iterable[Sequence]) -> int:
        """Return the number of pages that running sequences still need for their known tokens."""
        return sum(map(self.num_to_hold, running))

    def fits(self, sequence: Sequence, found: list[int], running: Iterable[Sequence]) -> bool:
        """Return whether a sequence that reuses the pages `found` can start beside the running."""
        most = most_pages(sequence.request.tier_choice, self.page_size, self._max_chunk)
        num_needed = self.num_needed(sequence, len(sequence.token_ids)) // self.num_groups
        num_taken = 0
        for group, window in enumerate(self._windows):
            reused = [page for page in found[group :: self.num_groups] if page != HOLE]
            # A cached page that is reused can no longer be evicted.
            num_cached = [self.pool.is_cached(page) for page in reused].count(True)
            most_here = self._most_here(most, window)
            if window is None or most_here is None:
                total = num_needed if most_here is None else min(num_needed, most_here)
                num_taken += total - len(reused) + num_cached
            else:
                # The others' pages are not free when they let them go, so they count as taken.
                num_new = num_needed - self.num_per_group(found) + num_cached
                num_taken += min(num_new, most_here) + len(reused) - num_cached
        return num_taken + self.num_reserved(running) <= self.pool.num_available

    @property
    def num_read_for(self) -> int:
        """Return the number of waiting sequences whose pages are held for a read."""
        return 0 if self.lower_store is None else self.lower_store.num_awaited

    def is_read_for(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence is one of them."""
        return self.lower_store is not None and self.lower_store.reads_for(sequence)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate the pages of the first `num_tokens` tokens; return False if too few are left."""
        if num_tokens * self.num_groups <= len(sequence.pages) * self.page_size:
            return True
        num_needed = self.num_needed(sequence, num_tokens)
        if num_needed > self.pool.num_available:
            return False
        sequence.pages += self.pool.allocate(num_needed)
        return True

    def end_a_read(self, rank: tuple[int, int]) -> bool:
        """End the lower store's last read, if its sequence comes after `rank`."""
        return self.lower_store is not None and self.lower_store.end_last(rank)

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's pages; it is computed from its start again."""
        self._let_go(sequence.forget_computed())
        if self.states is not None:
            self.states.release(sequence)

    def drop_unread(self, sequence: Sequence) -> None:
        """Release the pages that no later query of the sequence reads, and leave holes."""
        kept = sequence.kept
        if kept is None and not self._has_windows:
            return
        for group, window in enumerate(self._windows):
            reads = kept if window is None else Kept(0, window)
            if reads is None:
                continue
            begin, end = reads.droppable(sequence.num_computed, self.page_size)
            begin = max(begin, sequence.ends_dropped.get(group, 0))
            if begin >= end:
                continue
            places = slice(begin * self.num_groups + group, end * self.num_groups, self.num_groups)
            dropped = sequence.pages[places]
            sequence.pages[places] = [HOLE] * len(dropped)
            sequence.ends_dropped[group] = end
            self._let_go(dropped)

    def _let_go(self, pages: list[int]) -> None:
        pages = [page for page in pages if page != HOLE]
        if self._detained is None:
            self.pool.release(pages)
        else:
            self._detained.append(pages)

    def detain(self) -> None:
        """Keep all pages that are released from now on until `release_detained`.

        A step that the device still runs may write to them.
        """
        assert self._detained is None, "two steps detain pages"
        self._detained = []

    def release_detained(self) -> None:
        detained, self._detained = self._detained, None
        for pages in detained or ():
            self.pool.release(pages)

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Assign to a sequence without pages the cached pages that match its known tokens."""
        keys = self.reusable_keys(sequence)
        found = self._match(keys)
        if self.states is not None:
            keys = keys[: len(found)]
            found = found[: self.states.num_reusable(keys)]
            self.states.start(sequence, keys)
        self.pool.share([page for page in found if page != HOLE])
        if self.lower_store is not None and found:
            places = [divmod(at, self.num_groups) for at, page in enumerate(found) if page != HOLE]
            self.lower_store.used([(group_key(keys[at], group), at) for at, group in places])
        sequence.pages = list(found)
        sequence.num_published = self.num_per_group(found)
        sequence.num_computed = sequence.num_published * self.page_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
            sequence.num_under_others = self._num_under_others(sequence, keys)

    def _num_under_others(self, sequence: Sequence, keys: list[Key]) -> int:
        """Return the tokens behind those it shares that the cache has under other tables only."""
        if self._is_scored(sequence):
            return 0
        num_full = (len(sequence.token_ids) - 1) // self.page_size
        num_pages = num_found = sequence.num_published
        texts = sequence.text_keys(num_full, self.page_size)
        while num_pages < num_full and self.index.has_text(texts[num_pages]):
            is_own = num_pages < len(keys) and self.index.page_of(keys[num_pages]) is not None
            if is_own:
                break  # another reason than its tables, such as a window whose pages are gone
            num_pages += 1
        return (num_pages - num_found) * self.page_size

    def reusable_pages(self, keys: list[Key]) -> list[int]:
        """Return the cached pages that a sequence with these keys would start with."""
        found = self._match(keys)
        if self.states is None or not found:
            return found
        return found[: self.states.num_reusable(keys[: len(found)])]

    def _match(self, keys: list[Key]) -> list[int]:
        """Return the pages of the longest known prefix of `keys`, with holes that nothing reads."""
        if self.num_groups == 1 and not self._has_windows:
            return self.index.match(keys)
        return self.index.match_groups(keys, self._windows, self.page_size, HOLE)

    def plan_junction(
        self, running: Iterable[Sequence], keys: list[Key], num_found: int
    ) -> Iterable[Sequence]:
        """Let a running sequence share its state where a start leaves it; return that sequence.

        Pages are shared anyway. `keys`, `num_found`: the start's pages, and how many it shares now.
        """
        ahead = self.states and self.states.plan_junction(running, keys, num_found)
        return [ahead] if ahead else []

    def awaited(self, keys: list[Key]) -> list[Key]:
        """Return those of the keys of missing pages that a start may wait for, the best first."""
        return keys[:1] if self.states is None else keys[::-1]

    @property
    def has_free_slot(self) -> bool:
        """Return whether another sequence could have a slot; True if the model has no states."""
        return self.states is None or self.states.pool.num_available > 0

    def reusable_keys(self, sequence: Sequence) -> list[Key]:
        """Return the keys of the pages it could reuse, without the last token.

        A sequence whose prompt is scored reuses none, because cached positions have no logits.
        """
        if self._is_scored(sequence):
            return []
        length = min(len(sequence.token_ids) - 1, sequence.num_sharable)
        return sequence.page_keys(length // self.page_size, self.page_size)

    def _is_scored(self, sequence: Sequence) -> bool:
        """Return whether rows of the prompt are still to be scored."""
        is_asked = sequence.request.sampling.prompt_logprobs is not None
        return is_asked and sequence.num_scored < sequence.num_prompt_tokens

    def keys_in_flight(self, sequence: Sequence) -> list[Key]:
        """Return the keys of what a running sequence has yet to publish: full pages, or states."""
        if self.states is not None:
            return self.states.keys_in_flight(sequence)
        num_full = min(len(sequence.token_ids), sequence.num_sharable) // self.page_size
        if num_full <= sequence.num_published or not sequence.is_cacheable:
            return []
        return sequence.page_keys(num_full, self.page_size)[sequence.num_published :]

    def publish(self, sequence: Sequence) -> None:
        """Add the sequence's computed full pages to the prefix index."""
        num_full = min(sequence.num_computed, sequence.num_sharable) // self.page_size
        if not sequence.is_cacheable or num_full <= sequence.num_published:
            return
        keys = sequence.page_keys(num_full, self.page_size)
        texts = sequence.text_keys(num_full, self.page_size)
        for at in range(sequence.num_published, num_full):
            for group in range(self.num_groups):
                page, key = sequence.pages[at * self.num_groups + group], group_key(keys[at], group)
                if page != HOLE:
                    self.index.publish(page, key, None if group else texts[at])
                    if self.lower_store is not None:
                        self.lower_store.offer(key, at)
        sequence.num_published = num_full

    def invalidate_prefix_cache(self, running: Iterable[Sequence]) -> None:
        """Clear the prefix cache. Running sequences keep their pages, but publish no more."""
        self.pool.drop_cached()
        self.index.clear()
        if self.states is not None:
            self.states.invalidate()
        if self.lower_store is not None:
            self.lower_store.distrust()
        for sequence in running:
            sequence.is_cacheable = False

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Check that exactly the used pages are held or detained. Raises AssertionError."""
        self.pool.check_integrity()
        running = list(running)
        if self.states is not None:
            self.states.check_integrity(running)
        ref_counts = [0] * self.pool.num_pages
        for sequence in running:
            assert self.num_per_group(sequence.pages) * self.page_size >= sequence.num_computed
        in_reads = [] if self.lower_store is None else [self.lower_store.held()]
        held = (*(each.pages for each in running), *(self._detained or ()), *in_reads)
        for pages in held:
            for page in pages:
                if page != HOLE:
                    ref_counts[page] += 1
        assert ref_counts == self.pool.ref_counts, "a ref count is not the number of holders"
