"""The addresses of the servers that run, as Ray tells them to this process.

Ray makes its request router itself, so the two meet in one object of the process.
"""

import threading
from collections.abc import Callable, Iterable

Follower = Callable[[list[str]], None]


class Addresses:
    """The last known addresses, and who is told of changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls: list[str] = []
        self._follower: Follower | None = None

    def update(self, urls: Iterable[str]) -> None:
        """Note the addresses of all servers."""
        with self._lock:
            self._urls = sorted(urls)
            if self._follower is not None:
                self._follower(self._urls)

    def follow(self, follower: Follower) -> None:
        """Call `follower` with the addresses now, and at each change, in whatever thread."""
        with self._lock:
            self._follower = follower
            follower(self._urls)


ADDRESSES = Addresses()  # of this process
