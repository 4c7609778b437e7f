"""The pages that a replica probably has cached, as far as a router knows from its own choices."""

from collections.abc import Sequence

from model_runtime.cache.prefix_cache import Key


class PageMemory:
    """The most recently used page keys of one replica, at most as many as its cache has pages.

    It can be wrong in both directions: answers take pages, too, and other routers send requests.
    A wrong guess costs time only, because the replica looks its own pages up.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self._keys: dict[Key, None] = {}  # in order of last use, oldest first

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[Key]) -> int:
        """Return the number of leading keys that are remembered."""
        for num_known, key in enumerate(keys):
            if key not in self._keys:
                return num_known
        return len(keys)

    def num_evicted_by(self, keys: Sequence[Key]) -> int:
        """Return how many pages of other prompts `note` would forget for these keys."""
        num_known = self.match(keys)
        num_new = min(len(keys), self.max_pages) - num_known
        num_others = len(self._keys) - num_known
        return min(num_others, max(0, len(self._keys) + num_new - self.max_pages))

    def note(self, keys: Sequence[Key]) -> None:
        """Remember a prompt's keys as the most recent, and drop the least recent beyond the bound.

        The last page of a prompt is the first to go, as in the page pool: a prefix is more useful
        than its continuation.
        """
        for key in reversed(keys[: self.max_pages]):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self.max_pages:
            del self._keys[next(iter(self._keys))]
