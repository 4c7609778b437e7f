"""The outputs of one replica as they arrive at the API: one reader for all requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import structlog

from server.replicas.outbox import Entry
from server.replicas.remote_engine import ReplicaLostError
from server.replicas.wire import MISSING, MissingOutputError

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
