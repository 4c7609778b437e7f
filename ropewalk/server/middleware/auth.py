"""API keys, with access denied by default, and an id for every request."""

import re
import secrets
import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropewalk.server.access.allowance import Allowance
from ropewalk.server.access.assigned_ids import (
    ANSWER_HEADER,
    KEY_HEADER,
    AssignedIds,
    assign_ids,
)
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.keys import digest_of
from ropewalk.server.access.open_request import current_request
from ropewalk.server.envelope import envelope

# Answered without a key, because load balancers and orchestrators use them.
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/version"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ApiKeysMiddleware:
    """Middleware that passes a request if it has a valid key or its path is open."""

    def __init__(self, app: ASGIApp, ring: KeyRing, open_paths: frozenset[str]) -> None:
        self._app = app
        self._ring = ring
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["path"] in self._open_paths or _may_read(scope):
            await self._app(scope, receive, send)
            return
        allowance = self._allowance(scope)
        if allowance is not None:
            opened = current_request()
            if opened is not None:
                opened.allowance = allowance
            await self._app(scope, receive, send)
            return
        answer = JSONResponse(
            envelope(
                "No valid API key. Send `Authorization: Bearer KEY`.",
                "authentication_error",
                code="invalid_api_key",
            ),
            401,
            {"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await answer(scope, receive, send)

    def _allowance(self, scope: Scope) -> Allowance | None:
        """Return the allowance of the request's key, or None without a valid one."""
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not key and "x-api-key" in headers:  # of Anthropic's clients
            scheme, key = "bearer", headers["x-api-key"]
        found = self._ring.find(key.strip())
        return found if scheme.lower() == "bearer" else None


def _may_read(scope: Scope) -> bool:
    """Return whether a trusted router asks for what no client's answer is in."""
    is_read = scope["method"] == "GET" and scope["path"].startswith(("/v1/models", "/metrics"))
    return is_read and bool(scope.get("state", {}).get("is_for_router"))


class RouterMiddleware:
    """Middleware that takes an answer's identity from a router with the right key only."""

    def __init__(self, app: ASGIApp, key: str | None, *, only: bool = False) -> None:
        """`only`: whether all requests but probes have to come with the key."""
        self._app = app
        self._key = None if key is None else digest_of(key)
        self._only = only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            assign_ids(None)  # a connection's requests may run in one context
            headers = Headers(scope=scope)
            given, answer = headers.get(KEY_HEADER), headers.get(ANSWER_HEADER)
            must_have = self._only and scope["path"] not in OPEN_PATHS
            if must_have or given is not None or answer is not None:
                problem = self._problem(given or "", answer)
                if problem is not None:
                    body = envelope(problem, "permission_error", code="router_not_trusted")
                    await JSONResponse(body, 403, {"Connection": "close"})(scope, receive, send)
                    return
                # A client's request that a router passes on has an identity.
                scope.setdefault("state", {})["is_for_router"] = answer is None
        await self._app(scope, receive, send)

    def _problem(self, given: str, answer: str | None) -> str | None:
        """Return why the headers are refused; None: they are taken."""
        if self._key is None or not secrets.compare_digest(digest_of(given), self._key):
            return f"{KEY_HEADER} must be the router_key of this server, if it has one."
        if answer is not None:
            told = AssignedIds.of(answer)
            if told is None:
                return f"{ANSWER_HEADER} must be 32 hexadecimal digits, a time and a seed."
            assign_ids(told)
        return None


class RequestIdMiddleware:
    """Middleware that sets X-Request-Id on every response: the client's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = given_id(scope) or f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        await self._app(scope, receive, send_with_id)


def given_id(scope: Scope) -> str | None:
    """Return the id in a request's head; None without a valid one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else None
