"""Which cache pages are free. Numbers only: the tensors are in kv_store.py."""

from collections.abc import Iterable


class PagePool:
    """Hands out page ids and takes them back."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_used = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """That many pages; the caller has checked `num_free`."""
        assert num_pages <= len(self._free), "allocate() without a look at num_free"
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_used[page] = True
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back, each once."""
        for page in pages:
            assert self._is_used[page], f"page {page} freed twice"
            self._is_used[page] = False
            self._free.append(page)

    def check_integrity(self) -> None:
        """Every page is free or used, never both, none lost. Raises AssertionError."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not any(self._is_used[page] for page in self._free), "a free page is in use"
        assert sum(self._is_used) == self.num_used, "a page is lost"
