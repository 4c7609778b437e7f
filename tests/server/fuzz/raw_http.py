"""Bytes to a server and its answers back, over a plain socket without a client library."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_PIECE = 65536


class NoAnswerError(AssertionError):
    """The server kept the connection open and sent nothing for the whole time."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; `is_whole` is false if the connection ended inside it."""

    status: int
    head: str
    body: bytes
    is_whole: bool = True


def address_of(url: str) -> tuple[str, int]:
    """The host and the port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def request(
    body: bytes,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),),
    close: bool = True,
) -> bytes:
    """A well-formed request around any body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines += ["Connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@contextmanager
def connection(address: tuple[str, int], limit_s: float = 20) -> Iterator[socket.socket]:
    """A connected socket, closed at the end."""
    with socket.create_connection(address, limit_s) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def exchange(
    address: tuple[str, int], raw: bytes, *, num_replies: int = 1, limit_s: float = 20
) -> list[Reply]:
    """Send, and read until so many answers are there or the server closes.

    A server may answer and close before it has read everything; what is lost by that is no
    error here, and then the list may be empty. NoAnswerError after `limit_s`.
    """
    with connection(address, limit_s) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(raw)
        return read_replies(sock, num_replies, limit_s)


def read_replies(sock: socket.socket, num_replies: int, limit_s: float) -> list[Reply]:
    """Until so many answers are there or the server closes. NoAnswerError after `limit_s`."""
    received, deadline = bytearray(), time.monotonic() + limit_s
    while True:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = sock.recv(_PIECE)
        except TimeoutError:
            raise NoAnswerError(f"silent for {limit_s} s after {bytes(received[:200])!r}") from None
        except ConnectionResetError:
            piece = b""
        received += piece
        found = parse_replies(bytes(received), is_over=not piece)
        whole = [reply for reply in found if reply.is_whole]
        if not piece:
            return found
        if len(whole) >= num_replies:
            return whole  # another that has only begun to arrive is not broken off


def parse_replies(received: bytes, *, is_over: bool) -> list[Reply]:
    """Every answer in it but 1xx ones; the last may be incomplete."""
    found: list[Reply] = []
    while received:
        head_bytes, separator, rest = received.partition(b"\r\n\r\n")
        head = head_bytes.decode("latin-1")
        if not separator or not head.startswith("HTTP/1."):
            found.append(Reply(0, head[:200], b"", is_whole=False))
            break
        status = int(head.split(" ", 2)[1])
        if status < 200:
            received = rest
            continue
        body, received, is_whole = _body(head, status, rest, is_over=is_over)
        found.append(Reply(status, head, body, is_whole))
        if not is_whole:
            break
    return found


def _body(head: str, status: int, rest: bytes, *, is_over: bool) -> tuple[bytes, bytes, bool]:
    """(body, what follows it, whether the body is whole)."""
    if status in {204, 304}:
        return b"", rest, True
    if re.search(r"^transfer-encoding: *chunked", head, re.IGNORECASE | re.MULTILINE):
        return _chunks(rest)
    length = re.search(r"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
    if length is None:
        return rest, b"", is_over
    size = int(length[1])
    return rest[:size], rest[size:], len(rest) >= size


def _chunks(rest: bytes) -> tuple[bytes, bytes, bool]:
    body = bytearray()
    while True:
        line, separator, after = rest.partition(b"\r\n")
        if not separator:
            return bytes(body), b"", False
        size = int(line.split(b";")[0], 16)
        if len(after) < size + 2:
            return bytes(body) + after[:size], b"", False
        if size == 0:
            return bytes(body), after[2:], True
        body += after[:size]
        rest = after[size + 2 :]
