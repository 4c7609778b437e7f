"""The lower store as the engine's thread uses it: which pages are copied, awaited and published.

Pages are written behind. A published page is noted, and copied in a later step if it is still
cached. A step copies a few megabytes at most while requests run. If the writer's memory is full,
pages wait, and those that are evicted meanwhile are dropped.

A read pays if the disk gives a page sooner than the model computes it. Both times are measured. The
sequence waits, other sequences start, and pages that arrive become cached pages. At a miss, a bad
file or its deadline, the sequence starts with what has arrived.

On a GPU a copy may still run while the next step is queued. A step waits for the copies to pages
that it could read. It waits for a copy from a page only if that page was evicted meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable

from ropewalk.model_runtime.engine.kv_disk.buffers import Bytes, Done, PageCopies
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, StoreCounts
from ropewalk.model_runtime.engine.kv_disk.reader import Fetch, Reader
from ropewalk.model_runtime.engine.kv_disk.writer import Copied, Writer
from ropewalk.model_runtime.scheduling.prefix_cache import Key, group_key, group_of
from ropewalk.model_runtime.scheduling.read_plan import (
    pages_before,
    stored_key,
    wanted_pages,
)
from ropewalk.model_runtime.scheduling.sequence import HOLE, Sequence
from ropewalk.model_runtime.scheduling.sequence_pages import SequencePages

WRITE_BYTES = 64 << 20  # of copies that wait for the disk
READ_BYTES = 32 << 20  # of pages that wait for the engine
_MOST_NOTED = 1 << 14  # pages to be copied
_DISTRUSTED_S = 60.0
_LOOKUP_S = 0.002  # a local file that is absent is known in this time
_TRY_AGAIN = 64  # every so many reads that would not pay one is done, to measure
_NEWEST_WEIGHS = 0.25  # of a new time in the running mean
_UNKNOWN_S = 30.0  # most of a read, if no prompt was computed yet
_LEAST_S = 0.25  # and in any case
_POLL_S = 0.05  # how often deadlines are looked at while nothing runs


class LowerStore:
    """Pages below the cache, in one store or two. All methods are for the engine's thread."""

    def __init__(
        self,
        memory: PageCopies,
        writer: Writer,
        reader: Reader,
        counting: Counting,
        num_used: tuple[int, ...],
    ) -> None:
        """Combine the parts.

        `num_used`: by group, the bytes of a page with its layers, which come first.
        """
        self._memory = memory
        self._num_used = num_used
        self._writer = writer
        self._reader = reader
        self._counting = counting
        self._pages: SequencePages
        self._noted: deque[tuple[Key, int]] = deque()
        self._recent: deque[tuple[float, Key]] = deque()  # read or copied in the last minute
        self._fetches: dict[Sequence, Fetch] = {}
        self._leaving: deque[tuple[Done, int, Key]] = deque()  # copies from pages that still run
        self._arriving: deque[tuple[Done, Bytes]] = deque()  # copies to pages, and their memory
        self._page_computed_s: float | None = None  # None: no prompt was computed yet
        self._num_refused = 0

    def start(self, pages: SequencePages, wake: Callable[[], None]) -> None:
        """Serve the owner of the cache's pages; the threads call `wake` when there is news."""
        self.serve(pages)
        self._writer.start(wake)
        self._reader.start(wake)

    def serve(self, pages: SequencePages) -> None:
        """Serve the owner of the cache's pages, without threads."""
        self._pages = pages
        pages.lower_store = self

    @property
    def num_awaited(self) -> int:
        """Return the number of sequences that wait for a read of their own."""
        return len(self._fetches)

    def reads_for(self, sequence: Sequence) -> bool:
        return sequence in self._fetches

    @property
    def patience_s(self) -> float:
        """Return for how long the engine may wait for news if nothing runs."""
        return _POLL_S

    @property
    def _has_windows(self) -> bool:
        """Return whether a read page may be of use only together with others."""
        return any(self._pages.layout[0])

    # Writes

    def used(self, pages: list[tuple[Key, int]]) -> None:
        """Let the store know that a sequence starts with these pages, each with its position."""
        if not self._writer.is_off:
            self._writer.used([(stored_key(key), depth) for key, depth in pages])

    def offer(self, key: Key, depth: int) -> None:
        """Note a published page; `depth` pages are before it in its prefix."""
        if self._writer.is_off:
            return
        if self._writer.pause.is_on or len(self._noted) >= _MOST_NOTED:
            self._counting.page("dropped")
        else:
            self._noted.append((key, depth))

    def stepped(self, *, is_busy: bool) -> StoreCounts | None:
        """Copy noted pages after a step, as far as memory goes, and return new counts.

        `is_busy`: requests are live, so little is copied. Returns None if nothing has happened.
        """
        self._copy_noted(self._memory.step_bytes if is_busy else WRITE_BYTES)
        is_paused = self._writer.pause.is_on or self._reader.is_paused(time.monotonic())
        return self._counting.take(is_paused=is_paused)

    def _copy_noted(self, left: int) -> None:
        """Copy noted pages of `left` bytes, and of one page at least, as far as memory goes."""
        while self._noted and left > 0 and self._copy_first():
            left -= self._memory.num_bytes

    def _copy_first(self) -> bool:
        """Copy the page that was noted first; return False if there is no memory for it."""
        if self._writer.store is None:
            return False
        key, depth = self._noted[0]
        page = self._pages.index.page_of(key)
        if page is None:  # evicted meanwhile
            self._noted.popleft()
            self._counting.page("dropped")
            return True
        buffer = self._writer.buffers.take()
        if buffer is None:
            return False
        self._noted.popleft()
        done = self._memory.copy_out(page, buffer)
        if done is not None:
            self._leaving.append((done, page, key))
        num_used = self._num_used[group_of(key)]
        self._writer.put(Copied(stored_key(key), depth, buffer, num_used, done))
        self._remember(key)
        return True

    def before_step(self) -> None:
        """Let the next step wait for copies from pages that are no longer cached."""
        for _ in range(len(self._leaving)):
            done, page, key = self._leaving.popleft()
            if self._pages.index.page_of(key) != page:  # the step may write to it
                self._memory.let_steps_wait(done)
            elif not done.query():
                self._leaving.append((done, page, key))

    def _remember(self, key: Key) -> None:
        self._recent.append((time.monotonic(), stored_key(key)))
        self._forget_older()

    def _forget_older(self) -> None:
        oldest = time.monotonic() - _DISTRUSTED_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()

    # Reads

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with so many tokens of prompts took."""
        page_size = self._pages.page_size
        if num_tokens < page_size:
            return  # a short chunk says little about a long one
        taken = seconds * page_size / num_tokens
        before = taken if self._page_computed_s is None else self._page_computed_s
        self._page_computed_s = before + _NEWEST_WEIGHS * (taken - before)

    def holds_back(self, sequence: Sequence, keys: list[Key], found: list[int]) -> bool:
        """Return whether a sequence should wait; begin to read the pages that it lacks.

        A read holds the pages that its sequence will start with.
        """
        num_found = self._pages.num_per_group(found)
        missing = keys[num_found:]
        store = self._writer.store
        if not missing or store is None or sequence.not_on_disk == missing[0]:
            return False
        if any(missing[0] in fetch.missing for fetch in self._fetches.values()):
            return True
        sequence.not_on_disk = missing[0]
        now = time.monotonic()
        needed = pages_before(keys, len(keys), *self._pages.layout)
        num_to_read = len([key for key in needed if self._pages.index.page_of(key) is None])
        if not self._reader.is_usable(now) or not self._pays(num_to_read / len(missing)):
            return False
        most_s = _UNKNOWN_S
        if self._page_computed_s is not None:
            most_s = max(_LEAST_S, self._page_computed_s * len(missing))
        fetch = self._new_fetch(sequence, keys, found, needed, now + most_s)
        self._fetches[sequence] = fetch
        self._reader.submit(store, fetch)
        fetch.answered.wait(_LOOKUP_S)
        if fetch.is_done and not fetch.arrived:
            self._end(sequence, fetch)
            return False
        return True

    def _new_fetch(
        self,
        sequence: Sequence,
        keys: list[Key],
        found: list[int],
        needed: list[Key],
        deadline: float,
    ) -> Fetch:
        """Return a read that holds all pages of its sequence; `needed`: if every page is there."""
        index, pool = self._pages.index, self._pages.pool
        first = dict.fromkeys(page for page in found if page != HOLE)
        num_before = self._pages.num_per_group(found)
        known = {
            key
            for group in range(self._pages.num_groups)
            for key in (group_key(each, group) for each in keys)
            if index.page_of(key) is not None
        }
        kept = dict.fromkeys(page for key in needed if (page := index.page_of(key)) is not None)
        # Windows before the place found count once more: the new ones come beside them.
        num_new = self._pages.num_to_hold(sequence) - len(kept)
        held = first | kept
        pool.share(list(held))
        reserved = pool.allocate(max(0, min(num_new, pool.num_available)))
        pages = wanted_pages(keys, num_before, *self._pages.layout, known)
        return Fetch(keys, num_before, pages, deadline, list(held), reserved)

    def _pays(self, num_reads: float) -> bool:
        """Return whether the reads of one position's pages take less time than computing them."""
        read_s, computed_s = self._reader.page_s, self._page_computed_s
        if read_s is None or computed_s is None or read_s * num_reads < computed_s:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN == 0

    def collect(self, *, is_busy: bool) -> None:
        """Publish what has arrived, and end the fetches that are over."""
        left = self._pages.pool.num_pages
        if is_busy:
            left = max(1, self._memory.step_bytes // self._memory.num_bytes)
        self._give_back(waits=not is_busy)
        now = time.monotonic()
        for sequence, fetch in list(self._fetches.items()):
            is_done = fetch.is_done  # read before the pages that came before it
            has_room = True
            while fetch.arrived and left > 0 and has_room:
                has_room = self._install(fetch)
                left -= 1
            is_late = not is_done and self._reader.is_late(fetch, now)
            if is_late:
                self._counting.bad("slow")
            if is_late or not has_room or (is_done and not fetch.arrived):
                self._end(sequence, fetch)

    def _give_back(self, *, waits: bool) -> None:
        """Give the reader back the memory of copies that have ended; `waits`: of all of them."""
        while self._arriving and (waits or self._arriving[0][0].query()):
            done, buffer = self._arriving.popleft()
            done.synchronize()
            self._reader.buffers.give(buffer)

    def _install(self, fetch: Fetch) -> bool:
        """Publish the next page of a fetch, and hold it; return False if no page is left for it."""
        pool = self._pages.pool
        key, buffer = fetch.arrived.popleft()
        page = self._pages.index.page_of(key)
        done = None
        if page is not None:  # a running sequence has computed it meanwhile
            pool.share([page])
            if fetch.reserved:
                pool.release([fetch.reserved.pop()])
        elif fetch.reserved or pool.num_available:
            page = fetch.reserved.pop() if fetch.reserved else pool.allocate(1)[0]
            done = self._memory.copy_in(page, buffer)
            self._remember(key)
            self._pages.index.publish(page, key)
            with self._counting as counts:
                counts.pages["read"] += 1
                counts.num_tokens_read += 0 if self._has_windows else self._pages.page_size
        if done is None:
            self._reader.buffers.give(buffer)
        else:
            self._memory.let_steps_wait(done)
            self._arriving.append((done, buffer))
        if page is None:
            return False
        fetch.held.append(page)
        return True

    def end_last(self, rank: tuple[int, int]) -> bool:
        """End the read for the last sequence, for its pages, if that comes after `rank`."""
        last = max(self._fetches, key=lambda each: each.rank, default=None)
        if last is None or last.rank < rank:
            return False
        self._end(last, self._fetches[last])
        return True

    def cancel(self, sequence: Sequence) -> None:
        """Let go of what an ended sequence waited for."""
        fetch = self._fetches.get(sequence)
        if fetch is not None:
            self._end(sequence, fetch)

    def _end(self, sequence: Sequence, fetch: Fetch) -> None:
        """Leave a fetch's pages as cached ones."""
        self._reader.give_up(fetch)
        del self._fetches[sequence]
        self._pages.pool.release(fetch.reserved)
        self._pages.pool.release(fetch.held)
        num_found = self._pages.num_per_group(self._pages.reusable_pages(fetch.keys))
        if self._has_windows and num_found > fetch.num_before:
            with self._counting as counts:
                counts.num_tokens_read += (num_found - fetch.num_before) * self._pages.page_size
        rest = fetch.keys[num_found:]
        sequence.not_on_disk = rest[0] if rest else None

    def held(self) -> list[int]:
        """Return the pages that reads hold."""
        fetches = self._fetches.values()
        return [page for each in fetches for page in (*each.held, *each.reserved)]

    # Ends

    def distrust(self) -> None:
        """Forget noted pages, and delete the files of those read or written in the last minute."""
        self._noted.clear()
        for sequence, fetch in list(self._fetches.items()):
            self._end(sequence, fetch)
        self._forget_older()
        self._writer.delete([key for _, key in self._recent])
        self._recent.clear()

    def close(self, timeout_s: float) -> None:
        """Write what is noted, for so long at most, and end the threads."""
        deadline = time.monotonic() + timeout_s
        for sequence, fetch in list(self._fetches.items()):
            self._end(sequence, fetch)
        while self._noted and self._writer.store is not None and time.monotonic() < deadline:
            self._copy_noted(WRITE_BYTES)  # the counts are for the last report
            time.sleep(0.005)
        self._reader.stop()
        self._writer.stop(max(0.0, deadline - time.monotonic()))
