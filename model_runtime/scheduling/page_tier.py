"""The interface of the scheduler to a tier of pages below the cache."""

from typing import Protocol

from ropewalk.model_runtime.scheduling.prefix_cache import Key
from ropewalk.model_runtime.scheduling.sequence import Sequence


class PageTier(Protocol):
    """Pages of prefixes that outlive their place in the cache. For the engine's thread only."""

    def offer(self, key: Key, depth: int) -> None:
        """Note a page that was published, to be kept later; `depth` pages are before it."""

    def collect(self, num_spare: int, *, is_busy: bool) -> None:
        """Publish pages that have arrived, in at most `num_spare` free pages.

        They become cached pages when the last one of a read has arrived, or its time is up.
        `is_busy`: sequences run, so little is copied at a time.
        """

    def holds_back(self, sequence: Sequence, keys: list[Key], found: list[int]) -> bool:
        """Return whether a sequence should wait for pages of the tier.

        `keys` are those of the pages it could reuse, and `found` the pages that it would start
        with now.
        """

    def cancel(self, sequence: Sequence) -> None:
        """Let go of what a sequence waits for, if it waits."""

    def distrust(self) -> None:
        """Forget what was noted or read of late, because an answer was not finite."""

    def held(self) -> list[int]:
        """Return the pages that reads hold, each as often as it is held."""
