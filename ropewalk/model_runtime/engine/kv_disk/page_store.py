"""The interface of a store that keeps pages by key: host memory, a folder, or Valkey."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat


class StoreError(Exception):
    """A fault of a store; the message is the end of a sentence about it."""


class Look(NamedTuple):
    """What a look at a store has found."""

    num_bytes: int
    name: str  # at random, and the same for all who share the store


class PageStore(Protocol):
    """Pages that outlive their place in the cache. Any thread may call any method.

    A store makes room for new pages by itself.
    """

    form: PageFormat

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page; return False if there is none. Raises BadPageError.

        The content of `into` is undefined after an error.
        """

    def put(self, key: bytes, page: memoryview, depth: int) -> bool:
        """Write a page; `depth` pages are before it. Raises StoreError or OSError.

        Returns False if nothing was written, most often because the page is there.
        """

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Record that pages, each with its depth, are used now. Raises StoreError or OSError."""

    def evict(self, keys: Sequence[bytes]) -> None:
        """Delete the pages of these keys, as far as there are any. Raises StoreError or OSError."""

    def look(self) -> Look | None:
        """Return the size; None if it is not known now. Raises StoreError or OSError."""
