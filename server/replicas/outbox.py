"""The outputs of an engine on their way to one API process: one message for each step.

A message for each request and step would cost more than the step itself: on a CPU, most of a
token's time would go to the transport.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Number of the run, and the fields of an output (wire.py) or a string that says why it ends.
Entry = tuple[int, tuple[Any, ...] | str]


class Outbox:
    """The outputs for one API process. The engine's thread fills it, the event loop empties it."""

    def __init__(self, most: int) -> None:
        """Hold at most about `most` outputs that were not sent."""
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._of_step: list[Entry] = []  # the engine's thread only
        self._ended: list[Callable[[], None]] = []  # the engine's thread only
        self._ready: list[Entry] = []
        self._has_news = asyncio.Event()
        self._reader: object | None = None  # the newest call of `messages`
        self.is_full = False  # the API has not taken what it should have

    def put(self, entry: Entry, then: Callable[[], None] | None = None) -> None:
        """Add an output of this step; `then` is called on the event loop when it is ready."""
        self._of_step.append(entry)
        if then is not None:
            self._ended.append(then)

    def flush(self) -> None:
        """Hand the outputs of a step to the event loop, with one wakeup."""
        if not self._of_step:
            return
        entries, self._of_step = self._of_step, []
        ended, self._ended = self._ended, []
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._receive, entries, ended)

    async def messages(self, limit_s: float) -> AsyncGenerator[list[Entry], None]:
        """Yield what is ready, and an empty list after `limit_s` seconds without anything.

        It ends when the outbox is full, or when a newer reader begins: the connection of an older
        one is broken, and what it took would be lost.
        """
        self._reader = reader = object()
        self._has_news.set()  # so that an older reader ends
        self.is_full = False
        while not self.is_full:
            if not self._ready:
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await self._has_news.wait()
            if self._reader is not reader:
                return
            self._has_news.clear()
            taken, self._ready = self._ready, []
            yield taken

    def _receive(self, entries: list[Entry], ended: list[Callable[[], None]]) -> None:
        # A reader that stands still cannot look, so the bound is kept here. The outputs that it
        # misses are numbered (wire.py), so the API notices.
        if len(self._ready) + len(entries) > self._most:
            self.is_full = True
        if self.is_full:
            self._ready = []
        else:
            self._ready += entries
        for call in ended:
            call()
        self._has_news.set()


class Outboxes:
    """The outboxes of an engine, one for each API process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._outboxes: dict[str, Outbox] = {}
        self._num_users: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of API processes that something is held for."""
        return len(self._outboxes)

    @contextmanager
    def of(self, api: str) -> Iterator[Outbox]:
        """Lend the outbox of an API process: its reader and all of its requests have the same one.

        It is forgotten when the last of them has ended. Call it on the event loop.
        """
        outbox = self._outboxes.get(api)
        if outbox is None:
            outbox = self._outboxes[api] = Outbox(self._most)
        self._num_users[api] = self._num_users.get(api, 0) + 1
        try:
            yield outbox
        finally:
            self._num_users[api] -= 1
            if not self._num_users[api]:
                del self._outboxes[api], self._num_users[api]

    def flush(self) -> None:
        """Pass the outputs of a step on; the engine's thread calls it."""
        for outbox in tuple(self._outboxes.values()):
            outbox.flush()
