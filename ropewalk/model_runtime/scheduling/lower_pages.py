"""The interface of the scheduler to a lower store, which has pages below the cache."""

from typing import Protocol

from ropewalk.model_runtime.scheduling.prefix_cache import Key
from ropewalk.model_runtime.scheduling.sequence import Sequence


class LowerPages(Protocol):
    """Pages of prefixes that outlive their place in the cache. For the engine's thread only."""

    def offer(self, key: Key, depth: int) -> None:
        """Note a page that was published, to be kept later.

        `key`: of the page in its group of layers. `depth` pages of the group are before it.
        """

    def used(self, pages: list[tuple[Key, int]]) -> None:
        """Note that a sequence starts with cached pages, each with its position in its group."""

    @property
    def num_awaited(self) -> int:
        """Return the number of sequences that wait for pages, each with all of its pages held."""

    def reads_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence is one of them."""

    def collect(self, *, is_busy: bool) -> None:
        """Publish pages that have arrived.

        They become cached pages when the last one of a read has arrived, or its time is up.
        `is_busy`: sequences run, so little is copied at a time.
        """

    def holds_back(self, sequence: Sequence, keys: list[Key], found: list[int]) -> bool:
        """Return whether a sequence should wait for pages of the store.

        `keys` are those of the pages it could reuse, and `found` the pages that it would start
        with now. The caller has checked that all of its pages are available.
        """

    def end_last(self, rank: tuple[int, int]) -> bool:
        """Let go of the pages for the last sequence that waits, if it comes after `rank`.

        Returns False if there is none.
        """

    def cancel(self, sequence: Sequence) -> None:
        """Let go of what a sequence waits for, if it waits."""

    def distrust(self) -> None:
        """Forget what was noted or read of late, because an answer was not finite."""

    def held(self) -> list[int]:
        """Return the pages that reads hold, each as often as it is held."""
