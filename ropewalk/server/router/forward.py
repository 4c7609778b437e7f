"""One request out to a server and its answer back, also if the server is lost in between."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from ropewalk.server.access.assigned_ids import ANSWER_HEADER, KEY_HEADER, AssignedIds, new_ids
from ropewalk.server.envelope import envelope
from ropewalk.server.replicas.text_chunks import TextChunks
from ropewalk.server.router.fleet.facts import Facts, why_none_goes_on
from ropewalk.server.router.fleet.fleet import Fleet
from ropewalk.server.router.fleet.server import Server
from ropewalk.server.router.replay import (
    DivergedError,
    EventSplitter,
    SentEvents,
    events_in,
    has_event,
    tells_failure,
)
from ropewalk.server.router.route_metrics import RouteMetrics
from ropewalk.server.router.upstream import Exchange, Headers, LostError
from ropewalk.server.settings.route_settings import RouteSettings

# Headers of a connection, not of a message (RFC 9110, 7.6.1), or made anew by this process.
_OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"}
    | {b"transfer-encoding", b"expect"}
)
_NOT_SENT_ON = _OF_A_CONNECTION | {
    *(b"host", b"content-length", ANSWER_HEADER.encode(), KEY_HEADER.encode()),
}
_NOT_SENT_BACK = _OF_A_CONNECTION | {b"date", b"server"}
_BUSY = frozenset({429, 503})
_IS_FULL = re.compile(rb'"code": ?"bodies_full"')  # the server is well
_HAS_STOPPED = re.compile(rb'"code": ?"engine_stopped"')
_PAUSE_S = 1.0  # before a stream asks busy servers again
_MOST_UNSENT = 100  # tries that reach no server

Start = Callable[[int, Headers], Awaitable[None]]
SendPart = Callable[[bytes], Awaitable[None]]

_log = structlog.get_logger(__name__)


class NoServerError(Exception):
    """No server could answer; the message says why."""

    def __init__(self, why: str, code: str) -> None:
        super().__init__(why)
        self.code = code


class _NoTurnError(Exception):
    """A stream that has lost its server found the others busy for too long."""


@dataclass(slots=True)
class Asked:
    """A request, and what of its answer the client has."""

    request_id: str
    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    chunks: TextChunks
    answer: AssignedIds | None  # None: no key of the router
    sent: SentEvents = field(default_factory=SentEvents)
    has_begun: bool = False  # the client has the head of a stream
    is_whole: bool = False  # the client has the head of an answer that is whole
    facts: Facts | None = None  # of the server that began the stream
    has_events: bool = False  # and more of it than comments
    num_lost: int = 0
    waits_until: float = 0.0  # the loop's time: the end of the wait for another server
    num_unsent: int = 0  # tries whose server was not reached
    refusals: set[str] = field(default_factory=set)  # servers that were busy

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Forwarder:
    """Passes requests to the servers of a fleet."""

    def __init__(self, settings: RouteSettings, fleet: Fleet, metrics: RouteMetrics) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics

    def new_ids(self) -> AssignedIds | None:
        """Return a new identity for an answer; None if the servers would not take it."""
        return None if self._settings.router_key is None else new_ids(time.time())

    async def run(self, asked: Asked, start: Start, send: SendPart) -> None:
        """Send a request on, and its answer back by `start` and `send`.

        Raises NoServerError if nothing has been sent back and no server can answer.
        """
        try:
            while not await self._try(asked, start, send):
                pass
        finally:
            self._fleet.choice.ended(asked.request_id)

    async def _try(self, asked: Asked, start: Start, send: SendPart) -> bool:
        """Ask one server; return False if another one has to be asked."""
        settings, loop = self._settings, asyncio.get_running_loop()
        limit_s = settings.wait_seconds
        if asked.method != "POST":  # only generation is worth more than the first look
            await self._fleet.first_look(min(limit_s, settings.silence_seconds))
            limit_s = 0.0
        if asked.has_begun:
            limit_s = max(0.0, asked.waits_until - loop.time())
        server = await self._fleet.pick(
            asked.request_id, asked.chunks, lambda each: _is_avoided(asked, each), limit_s
        )
        began = loop.time()
        if server is None:
            others = [each.facts for each in self._fleet.usable]
            told = why_none_goes_on(asked.facts, others, self._fleet.problems().values())
            await self._give_up(asked, send, told, "no_server")
            return True
        exchange: Exchange | None = None
        try:
            exchange = await server.pool.request(
                asked.method, asked.target, self._headers(asked), asked.body
            )
            return await self._answer(asked, server, exchange, start, send)
        except LostError as error:
            if server.ready_at <= began:
                self._fleet.doubt(server, str(error))
            return await self._lost(asked, server, error, send)
        except _NoTurnError:
            await self._give_up(asked, send, "All servers are busy.", "no_server")
            return True
        except DivergedError:
            _log.error("diverged", server=server.name, request_id=asked.request_id)
            told = "The server was lost, and another one does not give the same answer."
            await self._give_up(asked, send, told, "diverged")
            return True
        finally:
            if exchange is not None:
                server.pool.release(exchange)

    def _headers(self, asked: Asked) -> Headers:
        headers = [*asked.headers]
        if asked.answer is not None:
            assert self._settings.router_key is not None
            headers.append((ANSWER_HEADER.encode(), asked.answer.header().encode()))
            headers.append((KEY_HEADER.encode(), self._settings.router_key.encode()))
        return headers

    async def _answer(
        self, asked: Asked, server: Server, exchange: Exchange, start: Start, send: SendPart
    ) -> bool:
        """Send an answer back; return False if another server has to be asked."""
        if _is_stream(exchange):
            return await self._stream(asked, server, exchange, start, send)
        body = await exchange.whole()
        if exchange.status in _BUSY and await self._is_refused(
            asked, server, exchange.status, body
        ):
            return False
        if asked.has_begun:
            raise DivergedError  # the request has been valid before
        self._fleet.choice.first_token(asked.request_id)
        asked.is_whole = True
        await start(exchange.status, _sent_back(exchange.headers))
        await send(body)
        self._ended(asked, exchange.status)
        return True

    async def _is_refused(self, asked: Asked, server: Server, status: int, body: bytes) -> bool:
        """Return whether a busy server's answer is dropped, because there is another server.

        Raises _NoTurnError if a stream has waited for its time.
        """
        asked.refusals.add(server.name)
        if status == 503 and not _IS_FULL.search(body):
            self._fleet.doubt(server, "it answers 503")
        asked.num_lost += bool(_HAS_STOPPED.search(body))
        if asked.num_lost > self._settings.continue_attempts and not asked.has_begun:
            return False
        others = [each for each in self._fleet.usable if not _is_avoided(asked, each)]
        if not others and not asked.has_begun:
            return False
        if not others:
            is_over = asyncio.get_running_loop().time() >= asked.waits_until
            if is_over or asked.num_lost > self._settings.continue_attempts:
                raise _NoTurnError
            asked.refusals.clear()  # the client has a part, so it is worth waiting for
            await asyncio.sleep(_PAUSE_S)
        self._metrics.lost("busy")
        return True

    async def _stream(
        self, asked: Asked, server: Server, exchange: Exchange, start: Start, send: SendPart
    ) -> bool:
        """Send a stream back, or the part of it that the client does not have."""
        splitter, is_again = EventSplitter(), asked.has_begun
        if not is_again:
            asked.has_begun, asked.facts = True, server.facts
            # A stream that may go on elsewhere, or end with an error, has no length.
            headers = _sent_back(exchange.headers)
            unsized = [each for each in headers if each[0] != b"content-length"]
            await start(exchange.status, unsized)
        else:
            asked.sent.begin_again()
        while data := await exchange.read():
            if events := splitter.feed(data):
                await self._send_new(asked, events, send, is_again=is_again)
        if splitter.has_rest or (is_again and not asked.sent.is_repeated()):
            raise LostError("its answer ended in the middle")
        if is_again:
            self._metrics.continued("ok")
        self._ended(asked, exchange.status)
        return True

    async def _send_new(
        self, asked: Asked, events: bytes, send: SendPart, *, is_again: bool
    ) -> None:
        """Send what the client does not have of some events.

        Raises LostError if they tell that the server failed, and DivergedError.
        """
        is_failed = False
        if b"error" in events or b"failed" in events:
            events, is_failed = _before_failure(events)
        if is_again:
            events = asked.sent.beyond(events)
        if events:
            if not asked.has_events and has_event(events):
                asked.has_events = True
                self._fleet.choice.first_token(asked.request_id)
            await send(events)  # if it is cancelled here, the client has none of them
            asked.sent.keep(events)
        if is_failed:
            raise LostError("its engine ended")

    async def _lost(self, asked: Asked, server: Server, error: LostError, send: SendPart) -> bool:
        """Note a lost server; return False if the request can be sent again."""
        if not error.is_unsent:
            asked.num_lost += 1
            asked.waits_until = asyncio.get_running_loop().time() + self._settings.wait_seconds
        asked.num_unsent += error.is_unsent
        kind = "continuation" if asked.has_events else "retry"
        self._metrics.lost(kind)
        _log.warning(
            "server_lost",
            server=server.name,
            why=str(error),
            request_id=asked.request_id,
            kind=kind,
        )
        is_exact = asked.answer is not None or not asked.has_events
        is_often = asked.num_lost > self._settings.continue_attempts
        if is_often or asked.num_unsent > _MOST_UNSENT or not is_exact:
            told = "The server was lost, and the answer cannot go on."
            await self._give_up(asked, send, told, "server_lost")
            return True
        return False

    async def end(self, asked: Asked, send: SendPart) -> None:
        """End a request because the router ends. Raises NoServerError if nothing was sent back."""
        if not asked.is_whole:
            await self._give_up(asked, send, "The router is ending.", "draining")

    async def _give_up(self, asked: Asked, send: SendPart, told: str, code: str) -> None:
        """End a stream with an error event. Raises NoServerError if nothing was sent back."""
        if not asked.has_begun:
            self._ended(asked, 503)
            raise NoServerError(told, code if code == "draining" else "no_server")
        if asked.num_lost:
            self._metrics.continued("diverged" if code == "diverged" else "given_up")
        await send(error_events(asked.path, told, code, asked.sent))
        self._ended(asked, 200)

    def _ended(self, asked: Asked, status: int) -> None:
        self._metrics.answered(status)
        self._fleet.choice.ended(asked.request_id)


def _is_avoided(asked: Asked, server: Server) -> bool:
    """Return whether a server cannot take a request: it was busy, or its answer would differ."""
    if server.name in asked.refusals:
        return True
    return asked.has_begun and server.facts != asked.facts


def _is_stream(exchange: Exchange) -> bool:
    kinds = [value for name, value in exchange.headers if name == b"content-type"]
    return exchange.status == 200 and any(each.startswith(b"text/event-stream") for each in kinds)


def sent_on(headers: Headers) -> Headers:
    """Return the headers of a client that a server gets."""
    return [each for each in headers if each[0] not in _NOT_SENT_ON]


def _sent_back(headers: Headers) -> Headers:
    return [each for each in headers if each[0] not in _NOT_SENT_BACK]


def _before_failure(events: bytes) -> tuple[bytes, bool]:
    """Return the events before one that tells a failure of the server, and whether there is one."""
    num_bytes = 0
    for event in events_in(events):
        if tells_failure(event):
            return events[:num_bytes], True
        num_bytes += len(event)
    return events, False


def error_events(path: str, told: str, code: str, sent: SentEvents) -> bytes:
    """Return the events of an answer that cannot go on, in the format of its API."""
    body: dict[str, Any]
    if path.endswith("/messages"):
        body = {"type": "error", "error": {"type": "api_error", "message": told}}
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
    if path.endswith("/responses"):
        body = {
            "type": "error",
            "sequence_number": sent.num_events(),
            "code": code,
            "message": told,
            "param": None,
        }
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
    body = envelope(told, "server_error", code=code)
    return b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"
