"""Messages from rank 0 to its followers, and their faults back: a kind, a length, then bytes.

A step is a row of int32. Everything rarer is JSON. Nothing is unpickled, because such data may run
code.
"""

import enum
import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.rope import (
    NTK,
    DualChunk,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Profile,
    ReRope,
    Scaling,
    SelfExtend,
    Shifted,
    Sinks,
    Unscaled,
    Yarn,
)

_HEAD = struct.Struct("<BI")  # kind, bytes that follow
_KNOWN = -1  # in place of a number of pages: those of the same row in the step before
_SPAN = 5  # numbers that describe a span before its tokens, pages and rows
# The parts of a profile: scalings and position methods.
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Unscaled, Linear, NTK, DynamicNTK, Yarn, Llama3, LongRope),
        *(ReRope, SelfExtend, Shifted, Sinks, DualChunk),
    )
}


class Kind(enum.IntEnum):
    """The message of a frame."""

    JOIN = 1  # JSON: the group of processes
    LOAD = 2  # JSON: the model
    BUILD = 3  # JSON: a runner over a new cache
    TABLE = 4  # JSON: a profile that needs a rotation table
    STEP = 5  # int32: spans, and how many first tokens rank 0 sends from its device
    CAPTURE = 6  # JSON: the limits of captured steps
    FAULT = 7  # text, from a follower: the sentence of its last error


class Link:
    """One end of a connection between two processes of this machine."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: Kind, content: bytes) -> None:
        """Send a message. Raises OSError if the other process has ended."""
        self._end.sendall(_HEAD.pack(kind, len(content)) + content)

    def receive(self) -> tuple[Kind, bytes] | None:
        """Wait for a message; None if the other process has ended."""
        head = self._exactly(_HEAD.size)
        if head is None:
            return None
        kind, size = _HEAD.unpack(head)
        content = self._exactly(size)
        return None if content is None else (Kind(kind), content)

    def is_closed(self) -> bool:
        """Return whether the other process has ended; every message must have been received."""
        try:
            return not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def tell_fault(self, error: Exception) -> None:
        """Send an error's sentence, if the other process still listens."""
        first_line = str(error).strip().partition("\n")[0]
        with suppress(OSError):
            self.send(Kind.FAULT, f"{type(error).__name__}: {first_line}".encode())

    def shut(self) -> None:
        """Close the connection; both ends see it."""
        with suppress(OSError):  # the other process has ended
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor of this end; no thread may wait for a message."""
        self._end.close()

    def _exactly(self, size: int) -> bytes | None:
        parts = []
        while size:
            try:
                part = self._end.recv(min(size, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def json_bytes(values: Any) -> bytes:
    return json.dumps(values).encode()


class SpanPacker:
    """Packs the spans of steps for followers.

    A page table that the same row had in the step before is not sent again: seven groups of layers
    have 57 KB of them for a context of 131,072 tokens.
    """

    def __init__(self) -> None:
        self._sent: list[object] = []  # the array that each row had

    def pack(self, spans: Sequence[Span], num_unknown: int = 0) -> bytes:
        """Return the spans of a step as bytes, which must be the next that are unpacked.

        `num_unknown`: the first tokens of the step that only the device has.
        """
        rows: list[Sequence[int] | NDArray[np.int32]] = [(num_unknown,)]
        for row, span in enumerate(spans):
            is_known = row < len(self._sent) and span.pages is self._sent[row]
            numbers = (
                len(span.token_ids),
                span.first_position,
                _KNOWN if is_known else len(span.pages),
                span.table_id,
                len(span.logit_rows),
            )
            pages = () if is_known else span.pages
            rows += [numbers, span.token_ids, pages, span.logit_rows]
        # A list may change, and an array of pages keeps its numbers.
        self._sent = [each.pages if isinstance(each.pages, np.ndarray) else None for each in spans]
        # The pages are an array, so that no loop of Python goes through them.
        return b"".join(np.asarray(row, dtype=np.int32).tobytes() for row in rows)


class SpanUnpacker:
    """Unpacks what one `SpanPacker` has packed, in the same order."""

    def __init__(self) -> None:
        self._received: list[NDArray[np.int32]] = []  # the page table of each row

    def unpack(self, content: bytes) -> tuple[list[Span], int]:
        """Return the spans of a step, and how many first tokens only the device has."""
        numbers = np.frombuffer(content, np.int32)
        spans: list[Span] = []
        at = 1
        while at < len(numbers):
            num_tokens, first, num_pages, table_id, num_rows = numbers[at : at + _SPAN].tolist()
            lengths = (at + _SPAN, num_tokens, max(0, num_pages), num_rows)
            ends = np.cumsum(lengths).tolist()
            token_ids, pages, rows = (numbers[begin:end] for begin, end in pairwise(ends))
            if num_pages == _KNOWN:
                pages = self._received[len(spans)]
            spans.append(Span(token_ids.tolist(), first, pages, table_id, rows.tolist()))
            at = ends[-1]
        self._received = [np.asarray(each.pages, np.int32) for each in spans]
        return spans, int(numbers[0])


def profile_values(profile: Profile) -> dict[str, Any]:
    """Return a profile as values for JSON."""
    return {
        "scaling": _part_values(profile.scaling),
        "logn_len": profile.logn_len,
        "positions": None if profile.positions is None else _part_values(profile.positions),
    }


def profile_of(values: dict[str, Any]) -> Profile:
    scaling: Scaling = _part_of(values["scaling"])
    positions = values["positions"]
    return Profile(scaling, values["logn_len"], None if positions is None else _part_of(positions))


def _part_values(part: Any) -> dict[str, Any]:
    return {"kind": type(part).__name__, "fields": asdict(part)}


def _part_of(values: dict[str, Any]) -> Any:
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values["fields"].items()
    }
    return _KINDS[values["kind"]](**fields)
