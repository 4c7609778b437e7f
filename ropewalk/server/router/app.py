"""The ASGI application of a router: its own routes, and everything else passed on."""

import asyncio
import json
import re
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs

import structlog

from ropewalk.server.envelope import envelope
from ropewalk.server.middleware.availability import DRAINING, DRAINING_HEADERS, send_whole
from ropewalk.server.middleware.connections import chunk_writer
from ropewalk.server.router.body_chunks import NO_CHUNKS, chunks_of
from ropewalk.server.router.fleet.facts import none_ready
from ropewalk.server.router.fleet.fleet import Fleet
from ropewalk.server.router.forward import (
    Asked,
    Forwarder,
    NoServerError,
    SendPart,
    Start,
    sent_on,
)
from ropewalk.server.router.route_metrics import RouteMetrics
from ropewalk.server.router.upstream import Headers
from ropewalk.server.settings.request_sections import BODY_TIMEOUT_S
from ropewalk.server.settings.route_settings import RouteSettings
from ropewalk.server.version import own_commit, own_version

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_log = structlog.get_logger(__name__)
_EndedBy = Literal["work", "disconnect", "shutdown"]
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_GENERATES = ("/completions", "/responses", "/messages")
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_JSON, _TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"
_Read = tuple[int, str, bytes]  # status, type and body of an answer
# Of all requests, until their answers end: some thousand conversations. Four of the largest bodies
# fit in any case.
_ALL_BODIES_BYTES = 2**30
_LARGE = 1 << 18  # bytes of a body that is read off the event loop


class RefusedError(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class RouterApp:
    """Answers probes and metrics itself, and passes other requests to a server."""

    def __init__(self, settings: RouteSettings, fleet: Fleet, metrics: RouteMetrics) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._forwarder = Forwarder(settings, fleet, metrics)
        self._num_body_bytes = 0  # of all requests that run
        self._is_over = asyncio.Event()  # the time of the requests that run

    def end_requests(self) -> None:
        """End those that run: streams with an error event, others with 503."""
        self._is_over.set()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Handle one ASGI connection."""
        own = {
            "/live": self._live,
            "/ready": self._ready,
            "/health": self._ready,
            "/version": self._version,
        }.get(scope["path"])
        if own is not None and scope["method"] in {"GET", "HEAD"}:
            status, headers, body = own(scope)
            content = json.dumps(body).encode()
            await send_whole(send, status, {"Content-Type": "application/json", **headers}, content)
            return
        read = {
            "/metrics": self._page,
            "/metrics/servers": self._targets,
            "/stats": self._stats,
        }.get(scope["path"])
        if read is not None and scope["method"] == "GET":
            found = await read(scope)
            if found is not None:
                status, kind, content = found
                await send_whole(send, status, {"Content-Type": kind}, content)
                return
        await self._pass_on(scope, receive, send)

    async def _page(self, scope: "Scope") -> _Read | None:
        """Return the router's own metrics, or with ?server=URL those of a server.

        Only who may see the metrics of a server learns whether the router knows an address.
        """
        name = parse_qs(scope["query_string"].decode("latin-1")).get("server")
        if name is None:
            return 200, _TEXT, self._metrics.page(self._fleet.states(), self._fleet.refused())
        server, usable = self._fleet.servers.get(name[0]), self._fleet.usable
        if server is None and not usable:
            return None
        read = self._fleet.read(server or usable[0], "/metrics", _credentials(scope))
        status, content = await read
        if status == 200 and server is None:
            told = envelope("The router knows no such server.", "invalid_request_error")
            return 404, _JSON, json.dumps(told).encode()
        return status, _TEXT if status == 200 else _JSON, content

    async def _targets(self, scope: "Scope") -> _Read | None:
        """Return the servers' metrics as targets of Prometheus, if one lets the client see them."""
        usable = self._fleet.usable
        if not usable:
            return None
        status, content = await self._fleet.read(usable[0], "/metrics", _credentials(scope))
        if status == 200:
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            targets = [
                {
                    "targets": [host],
                    "labels": {"instance": each.target.name, "__param_server": each.name},
                }
                for each in self._fleet.servers.values()
                if not each.is_removed
            ]
            content = json.dumps(targets).encode()
        return status, _JSON, content

    async def _stats(self, scope: "Scope") -> _Read | None:
        """Return the numbers of all servers together, if they let the client see them."""
        found = await self._fleet.stats(_credentials(scope))
        return None if found is None else (200, _JSON, json.dumps(found).encode())

    def _live(self, _: "Scope") -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, {"status": "ok"}

    def _ready(self, scope: "Scope") -> tuple[int, Mapping[str, str], Any]:
        if scope.get("state", {}).get("is_draining"):
            return 503, DRAINING_HEADERS, DRAINING
        if self._fleet.usable:
            return 200, {}, {"status": "ok"}
        return (
            503,
            {"Retry-After": "1"},
            envelope(none_ready(self._fleet.problems().values()), "server_error"),
        )

    def _version(self, _: "Scope") -> tuple[int, Mapping[str, str], Any]:
        return 200, {}, {"version": own_version(), "commit": own_commit()}

    async def _pass_on(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Read the body, and answer with what a server answers."""
        request_id = _request_id(scope["headers"])
        held = _Held()
        has_started = False
        write = chunk_writer(scope)

        async def start(status: int, headers: Headers) -> None:
            nonlocal has_started
            has_started = True
            kept = [each for each in headers if each[0] != b"x-request-id"]
            kept.append((b"x-request-id", request_id))
            await send({"type": "http.response.start", "status": status, "headers": kept})

        async def send_part(data: bytes) -> None:
            if write is None or asked.is_whole:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            else:
                await write(data)

        try:
            content = await self._body(scope, receive, held)
            if content is None:
                return
            asked = await self._asked(scope, request_id, content)
            ended_by = await self._run(asked, receive, start, send_part)
            if has_started and ended_by != "disconnect":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except RefusedError as error:
            body = envelope(str(error), "invalid_request_error", code=error.code)
            await _send_json(send, error.status, {"Connection": "close"}, request_id, body)
        except NoServerError as error:
            body = envelope(str(error), "server_error", code=error.code)
            await _send_json(send, 503, {"Retry-After": "1"}, request_id, body)
        except Exception:  # noqa: BLE001  # no traceback may reach a client
            _log.exception("failed", request_id=request_id.decode())
            if not has_started:
                body = envelope("The router failed.", "server_error")
                await _send_json(send, 500, {"Connection": "close"}, request_id, body)
        finally:
            self._num_body_bytes -= held.num_bytes

    async def _run(
        self, asked: Asked, receive: "Receive", start: Start, send: SendPart
    ) -> _EndedBy:
        """Pass a request on until it ends; return what has ended it. Raises NoServerError."""
        ended_by = await _first_end(self._forwarder.run(asked, start, send), receive, self._is_over)
        if ended_by == "shutdown":
            await self._forwarder.end(asked, send)
        return ended_by

    async def _asked(self, scope: "Scope", request_id: bytes, body: bytes) -> Asked:
        headers: Headers = scope["headers"]
        found = dict(headers)
        owner = found.get(b"authorization", b"") or found.get(b"x-api-key", b"")
        if not self._may_have_prompt(scope):
            chunks = NO_CHUNKS
        elif len(body) < _LARGE:
            chunks = chunks_of(body, owner)
        else:
            chunks = await asyncio.to_thread(chunks_of, body, owner)
        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        kept = [each for each in sent_on(headers) if each[0] != b"x-request-id"]
        return Asked(
            uuid.uuid4().hex,
            scope["method"],
            (path + query).decode("latin-1"),
            [*kept, (b"x-request-id", request_id)],
            body,
            chunks,
            self._forwarder.new_ids(),
        )

    def _may_have_prompt(self, scope: "Scope") -> bool:
        is_generation = scope["method"] == "POST" and scope["path"].endswith(_GENERATES)
        return self._settings.routing == "prefix" and is_generation

    async def _body(self, scope: "Scope", receive: "Receive", held: "_Held") -> bytes | None:
        """Return the whole body; None if the client left. Raises RefusedError."""
        pieces, is_whole = [], False
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        self._check_size(int(declared) if declared.isdigit() else 0)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    self._check_size(held.num_bytes + len(piece), len(piece))
                    pieces.append(piece)
                    held.num_bytes += len(piece)
                    self._num_body_bytes += len(piece)
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            told = f"The body must arrive within {BODY_TIMEOUT_S:g} s."
            raise RefusedError(408, told, "body_timeout") from None
        return b"".join(pieces)

    def _check_size(self, num_bytes: int, num_new: int | None = None) -> None:
        """Refuse a body of so many bytes, `num_new` of which are not held yet (None: all)."""
        settings = self._settings
        if num_bytes > settings.max_body_bytes:
            told = f"The body must have at most {settings.max_body_bytes} bytes (max_body_bytes)."
            raise RefusedError(413, told, "body_too_large")
        num_new = num_bytes if num_new is None else num_new
        most = max(_ALL_BODIES_BYTES, 4 * settings.max_body_bytes)
        if self._num_body_bytes + num_new > most:
            told = f"All bodies together are more than {most} bytes now. Send it again later."
            raise RefusedError(503, told, "bodies_full")


@dataclass(slots=True)
class _Held:
    """The bytes of a request's body that count in those of all."""

    num_bytes: int = 0


async def _send_json(
    send: "Send", status: int, headers: Mapping[str, str], request_id: bytes, body: Any
) -> None:
    named = {"Content-Type": "application/json", "X-Request-Id": request_id.decode(), **headers}
    await send_whole(send, status, named, json.dumps(body).encode())


def _credentials(scope: "Scope") -> Headers:
    return [each for each in scope["headers"] if each[0] in _CREDENTIALS]


def _request_id(headers: Headers) -> bytes:
    """Return the client's request id, or a new one."""
    given = dict(headers).get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()


async def _first_end(
    work: Coroutine[Any, Any, None], receive: "Receive", is_over: asyncio.Event
) -> _EndedBy:
    """Return what ends a request first: its work, its client, or the router's end."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving, ending = asyncio.ensure_future(left()), asyncio.ensure_future(is_over.wait())
    try:
        await asyncio.wait({working, leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return "work"
        return "disconnect" if leaving.done() else "shutdown"
    finally:
        for each in (working, leaving, ending):
            each.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(working, leaving, ending, return_exceptions=True)
