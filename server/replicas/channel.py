"""The outputs of one replica as they arrive at the API: one reader for all requests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import structlog

from ropewalk.server.replicas.remote_engine import ReplicaLostError
from ropewalk.server.replicas.wire import MISSING, MissingOutputError

# The outputs of an engine on their way to one API process: one message for each step.
#
# A message for each request and step would cost more than the step itself: on a CPU, most of a
# token's time would go to the transport.

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


_SILENT, _DIED = "silent", "died"
_NUM_LOOKS = 4  # in the longest silence

_log = structlog.get_logger(__name__)


class Receiver(Protocol):
    """A request that waits for outputs."""

    def receive(self, fields: tuple[Any, ...] | str) -> None:
        """Take an output, or the reason why there are no more. Raises MissingOutputError."""

    def lose(self, error: ReplicaLostError) -> None:
        """End, because the replica is lost."""


class OutputChannel:
    """Reads the outputs of a replica, and gives each to its request, by number."""

    def __init__(
        self,
        replica: str,
        stream: AsyncIterator[list[Entry]],
        after_message: Callable[[], None],
        *,
        silence_s: float,
        gone: tuple[type[BaseException], ...],
    ) -> None:
        """Begin to read. `gone`: the exceptions that mean that the replica has ended."""
        self.replica = replica
        self._stream = stream
        self._after_message = after_message
        self._gone = gone
        self._receivers: dict[int, Receiver] = {}
        self.is_open = True
        self._reason = _DIED
        self._num_quiet_looks = 0
        self._look_s = silence_s / _NUM_LOOKS
        self._loop = asyncio.get_running_loop()
        self._looking = self._loop.call_later(self._look_s, self._look)
        self._reading = asyncio.ensure_future(self._read())
        # A task that is cancelled before it begins runs none of its own code.
        self._reading.add_done_callback(self._ended)

    @property
    def num_receivers(self) -> int:
        return len(self._receivers)

    def add(self, run: int, receiver: Receiver) -> None:
        """Give the outputs of a run to a receiver from now on."""
        self._receivers[run] = receiver

    def remove(self, run: int) -> None:
        self._receivers.pop(run, None)

    def close(self) -> None:
        self.is_open = False
        self._reading.cancel()

    async def _read(self) -> None:
        async for entries in self._stream:
            self._num_quiet_looks = 0
            for run, fields in entries:
                receiver = self._receivers.get(run)
                if receiver is not None:
                    self._give(receiver, fields)
            if entries:
                self._after_message()

    def _give(self, receiver: Receiver, fields: tuple[Any, ...] | str) -> None:
        try:
            receiver.receive(fields)
        except MissingOutputError:
            receiver.lose(ReplicaLostError(self.replica, MISSING))

    def _look(self) -> None:
        """End the channel if nothing came at the last looks.

        One long timer would also expire if this process itself stood still, and all replicas would
        be silent at once. After such a time only one look is due, and messages are read before the
        next.
        """
        self._num_quiet_looks += 1
        if self._num_quiet_looks > _NUM_LOOKS:
            self._reason = _SILENT
            self.close()
        else:
            self._looking = self._loop.call_later(self._look_s, self._look)

    def _ended(self, reading: asyncio.Task[None]) -> None:
        self.is_open = False
        self._looking.cancel()
        error = None if reading.cancelled() else reading.exception()
        if error is not None and not isinstance(error, self._gone):
            _log.error("outputs_failed", replica=self.replica, exc_info=error)
        cancel = getattr(self._stream, "cancel", None)
        if cancel is not None:
            cancel()
        for receiver in list(self._receivers.values()):
            receiver.lose(ReplicaLostError(self.replica, self._reason))
