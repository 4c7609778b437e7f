"""The pool of cache pages: free, in use, or cached. It holds no tensors.

A page is used while its ref count is positive; several sequences may share it. A page is cached
if its ref count is 0 but the prefix index knows it, and free otherwise. Allocation takes free pages
first, then evicts cached pages, least recently used first.
"""

from collections.abc import Sequence

from ropewalk.model_runtime.scheduling.prefix_cache import PrefixIndex


class PagePool:
    """The owner of all page ids and their ref counts."""

    def __init__(self, num_pages: int, index: PrefixIndex) -> None:
        self.num_pages = num_pages
        self._index = index
        self._free = list(range(num_pages - 1, -1, -1))
        self.ref_counts = [0] * num_pages
        self._cached: dict[int, None] = {}  # in order of last use, oldest first

    @property
    def num_available(self) -> int:
        """Return the number of pages that can be allocated now, evicted ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    @property
    def num_cached(self) -> int:
        """Return the number of pages with ref count 0 that the prefix index still knows."""
        return len(self._cached)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages for one sequence; the caller has checked `num_available`."""
        assert num_pages <= self.num_available, "allocate() without a look at num_available"
        pages = []
        for _ in range(num_pages):
            if self._free:
                page = self._free.pop()
            else:
                page = next(iter(self._cached))
                del self._cached[page]
                self._index.forget(page)
            self.ref_counts[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Increase the ref count of pages that are used or cached."""
        for page in pages:
            assert self.ref_counts[page] > 0 or page in self._cached, f"page {page} is free"
            self._cached.pop(page, None)
            self.ref_counts[page] += 1

    def is_cached(self, page: int) -> bool:
        """Return whether the page is cached; sharing it would reduce `num_available`."""
        return page in self._cached

    def release(self, pages: Sequence[int]) -> None:
        """Decrease the ref count of a sequence's pages, given in order of position.

        The last pages are evicted first, because a prefix is more useful than its continuation.
        """
        for page in reversed(pages):
            assert self.ref_counts[page] > 0, f"page {page} released twice"
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                if self._index.holds(page):
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def drop(self, page: int) -> None:
        """Free one cached page."""
        del self._cached[page]
        self._index.forget(page)
        self._free.append(page)

    def drop_cached(self) -> None:
        """Free every cached page."""
        for page in self._cached:
            self._index.forget(page)
            self._free.append(page)
        self._cached.clear()

    def check_integrity(self) -> None:
        """Check that every page is in exactly one state. Raises AssertionError."""
        self._index.check_integrity()
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._cached.keys(), "a page is free and cached"
        for page, ref_count in enumerate(self.ref_counts):
            idle = page in free or page in self._cached
            assert idle == (ref_count == 0), f"page {page} is lost or idle in use"
        assert all(self._index.holds(page) for page in self._cached), "a cached page has no key"
        assert not any(self._index.holds(page) for page in free), "a free page can be found"
