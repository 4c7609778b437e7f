"""The interface of a place that keeps pages by key: a folder, or a store on the network."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat


class StoreError(Exception):
    """A fault of a place that keeps pages; the message is the end of a sentence about it."""


class Room(NamedTuple):
    """The size of a place, as of a look at it."""

    left_bytes: int  # that this process may write before it looks again
    num_bytes: int  # that it holds now
    num_evicted: int  # pages that were deleted because they were the oldest
    name: str  # at random, and the same for all who share the place
    num_foreign: int = 0  # values of others in the place of ours, which were replaced


class PageStore(Protocol):
    """Pages that outlive the process. Any thread may call any method."""

    form: PageFormat

    def has(self, key: bytes) -> bool:
        """Return whether a page of this key need not be written. Raises StoreError."""

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a page; return False if there is none. Raises BadPageError.

        The content of `into` is undefined after an error.
        """

    def write(self, key: bytes, page: memoryview, depth: int) -> bool:
        """Write a page; `depth` pages are before it. Raises StoreError or OSError.

        Returns False if the place behind host memory had it already.
        """

    def discard(self, keys: Sequence[bytes]) -> None:
        """Delete the pages of these keys, as far as there are any. Raises StoreError."""

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Record that pages, each with its depth, are used now. Raises StoreError."""

    def look(self) -> Room | None:
        """Make room, and return the size; None if another process does. Raises OSError, StoreError.

        Nothing is written until a look has succeeded.
        """

    def reopen(self) -> None:
        """Find the place again after a fault. Raises StoreError or OSError."""
