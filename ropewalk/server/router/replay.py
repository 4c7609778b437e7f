"""Exact continuation of a stream: a second run's events are compared with those that were sent.

A server gives the same bytes for the same request, id, time and seed, so the events of each choice
are equal. The order between choices follows the engine's steps, which differ by run.
Some numbers tell of the run instead of the answer, and are not compared: cached tokens, times, and
the progress of a prompt. Comments and pings follow the clock and are left out.
"""

import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

END_OF_EVENT = b"\n\n"
# A window of 4 KiB holds several events, which are alike. A stream has 24 KiB of state in it.
_WINDOW_BITS, _MEMORY_LEVEL = -12, 5
_PLAIN_BYTES = 1 << 15  # that are kept as they are before they are compressed

# In the text of an answer a quote has a backslash before it, so these are names of our own.
_OF_THE_RUN = re.compile(
    rb'"(?:cached_tokens|input_tokens|cache_read_input_tokens|completed_at'
    rb'|accepted_prediction_tokens|rejected_prediction_tokens)": ?(?:[0-9]+|null)'
    rb'|"timings": ?\{[^{}]*\}'
)
_SKIPPED = (b":", b"event: ping\n")
_CHOICE = re.compile(rb'"choices": ?\[\{"index": ?([0-9]+)')
_PROGRESS = re.compile(rb'"prompt_progress": ?\{')
# How an answer tells that its engine has ended, by API.
_FAILURES = (
    (b'data: {"error"', re.compile(rb'"code": ?"engine_stopped"')),
    (b"event: error\n", re.compile(rb'"type": ?"api_error"')),
    (b"event: response.failed\n", re.compile(rb'"code": ?"server_error"')),
)
# The client did not read, so no other server can help.
_OF_THE_CLIENT = re.compile(rb'"code": ?"output_not_read"')


class DivergedError(Exception):
    """The second run gave other bytes than the client already has."""


def compared(event: bytes) -> bytes:
    """Return what of an event every run gives; empty if it tells of the run only."""
    if event.startswith(_SKIPPED) or _PROGRESS.search(event):
        return b""
    return _OF_THE_RUN.sub(b"", event)


def _choice_of(event: bytes) -> bytes:
    """Return the index of an event's choice; empty for an event of the whole answer."""
    found = _CHOICE.search(event)
    return b"" if found is None else found[1]


def tells_failure(event: bytes) -> bool:
    """Return whether an event says that the server failed, for no fault of the request."""
    if _OF_THE_CLIENT.search(event):
        return False
    return any(event.startswith(start) and found.search(event) for start, found in _FAILURES)


def has_event(events: bytes) -> bool:
    """Return whether there is more than comments."""
    return (
        events.startswith((b"data: ", b"event: "))
        or b"\n\nevent: " in events
        or (b"\n\ndata: " in events)
    )


class EventSplitter:
    """Cuts a stream of bytes behind whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the whole events up to these bytes, and keep the beginning of the next one."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if data.endswith(END_OF_EVENT):
            return data
        whole, end, self._rest = data.rpartition(END_OF_EVENT)
        return whole + end

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)


def events_in(data: bytes) -> Iterator[bytes]:
    """Yield each of whole events, with its end."""
    start = 0
    while (end := data.find(END_OF_EVENT, start)) >= 0:
        end += len(END_OF_EVENT)
        yield data[start:end]
        start = end


def _events_of(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the events of blocks that are cut anywhere."""
    rest = b""
    for block in blocks:
        whole, end, rest = (rest + block).rpartition(END_OF_EVENT)
        yield from events_in(whole + end)


class SentEvents:
    """The events that a client has, compressed, and how far a second run has repeated them."""

    def __init__(self) -> None:
        self._plain = bytearray()
        self._packed: list[bytes] = []
        self._packer: zlib._Compress | None = None
        self._due: Iterator[bytes] = iter(())
        self._waiting: dict[bytes, deque[bytes]] = {}  # taken from those that are due, by choice

    def keep(self, events: bytes) -> None:
        """Note events that are sent."""
        self._plain += events
        if len(self._plain) > _PLAIN_BYTES:
            self._pack()

    def _pack(self) -> None:
        if self._packer is None:
            self._packer = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
        if packed := self._packer.compress(bytes(self._plain)):
            self._packed.append(packed)
        self._plain.clear()

    def begin_again(self) -> None:
        """Expect the same events from the start."""
        self._due = filter(None, map(compared, self._all()))
        self._waiting.clear()

    def is_repeated(self) -> bool:
        """Return whether every event that the client has came again."""
        return not self._waiting and not self._take_due()

    def beyond(self, events: bytes) -> bytes:
        """Return those of the second run's events that the client does not have yet.

        Raises DivergedError if one differs from the client's.
        """
        if self.is_repeated():
            return events
        new = []
        for event in events_in(events):
            found = compared(event)
            if not found:
                if self.is_repeated():
                    new.append(event)
                continue
            choice = _choice_of(found)
            expected = self._expected(choice)
            if expected is None:
                # Events of the whole answer come before or after those of all choices.
                if self._waiting and (not choice or b"" in self._waiting):
                    raise DivergedError
                new.append(event)
            elif found != expected:
                raise DivergedError
        return b"".join(new)

    def _expected(self, choice: bytes) -> bytes | None:
        """Return the next of a choice's events that the client has; None if it has no more."""
        while choice not in self._waiting:
            if not self._take_due():
                return None
        waiting = self._waiting[choice]
        event = waiting.popleft()
        if not waiting:
            del self._waiting[choice]
        return event

    def _take_due(self) -> bool:
        """Let the next of the client's events wait for its choice; return False at the end."""
        event = next(self._due, None)
        if event is None:
            return False
        self._waiting.setdefault(_choice_of(event), deque()).append(event)
        return True

    def num_events(self) -> int:
        return sum(1 for event in self._all() if not event.startswith(b":"))

    def _all(self) -> Iterator[bytes]:
        """Yield the events so far; those that come later are not among them."""
        return _events_of(self._blocks())

    def _blocks(self) -> Iterator[bytes]:
        """Yield the bytes so far, a block at a time."""
        plain = bytes(self._plain)
        if self._packer is None:
            return iter((plain,))
        unpacker = zlib.decompressobj(_WINDOW_BITS)
        packed = (*self._packed, self._packer.copy().flush())
        return chain(map(unpacker.decompress, packed), (plain,))
