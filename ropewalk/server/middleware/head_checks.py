"""Refusals by a request's head alone: its number of headers, its framing, and its Host header."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ropewalk.server.envelope import envelope

# No public name server has addresses for these. A container calls its host by an `.internal` one.
_LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_LOCAL_SUFFIXES = (".localhost", ".internal")
_MAX_SHOWN = 64  # characters of a client's host in the message


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The host names that requests may have in their Host header.

    Addresses and local names are always allowed. A web page can reach this server as its own origin
    if the page's name resolves to the server's address (DNS rebinding), but then the header holds
    that name.
    """

    names: frozenset[str]
    suffixes: tuple[str, ...]  # of subdomains, with the leading point

    @classmethod
    def of(cls, names: Iterable[str]) -> "AllowedHosts":
        """Build it from names, of which `*.example.org` stands for the subdomains."""
        lower = [name.lower() for name in names]
        wild = tuple(name[1:] for name in lower if name.startswith("*."))
        return cls(frozenset(lower) | _LOCAL_NAMES, (*wild, *_LOCAL_SUFFIXES))

    def allows(self, host: str) -> bool:
        """Return whether a Host header is allowed; its port does not matter."""
        name = host.strip().lower()
        if name.startswith("["):  # an IPv6 address
            return _is_address(name[1:].partition("]")[0])
        name = name.partition(":")[0].removesuffix(".")
        return name in self.names or name.endswith(self.suffixes) or _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class HeadRules:
    """Rules that every request's head has to meet."""

    max_headers: int = 100
    hosts: AllowedHosts | None = None  # None: any host


class HeadChecksMiddleware:
    """Middleware that refuses a request by its head, before keys are read and the body arrives."""

    def __init__(self, app: ASGIApp, rules: HeadRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(scope) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return the answer to a head that is refused, or None."""
        rules, headers = self._rules, Headers(scope=scope)
        if len(scope["headers"]) > rules.max_headers:
            told = f"A request may have {rules.max_headers} headers."
            return _refused(431, told, "headers_too_large")
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy in front may have taken the other one for the body's end (RFC 9112, 6.1).
            told = "A request must have Content-Length or Transfer-Encoding, not both."
            return _refused(400, told, "ambiguous_length")
        host = headers.get("host")  # HTTP/1.0 may have none, and no browser speaks it
        if rules.hosts is not None and host is not None and not rules.hosts.allows(host):
            shown = f"{host[:_MAX_SHOWN]!a}"
            told = f"The Host header must be one of allowed_hosts. Given: {shown}"
            return _refused(403, told, "host_not_allowed")
        return None


def _refused(status: int, message: str, code: str) -> JSONResponse:
    # The body has not been read. Its bytes would be taken as the next request.
    body = envelope(message, "invalid_request_error", code=code)
    return JSONResponse(body, status, {"Connection": "close"})
