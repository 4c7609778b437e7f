"""Refuse requests whose Host header has a foreign name."""

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


class HostCheckMiddleware:
    """Middleware that refuses foreign hosts, before keys are read and the body arrives."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        # HTTP/1.0 may have no Host, and no browser speaks it.
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._hosts.allows(host):
            await self._app(scope, receive, send)
            return
        shown = f"{host[:_MAX_SHOWN]!a}"
        told = f"The Host header must be one of allowed_hosts. Given: {shown}"
        body = envelope(told, "invalid_request_error", code="host_not_allowed")
        # The body has not been read. Its bytes would be taken as the next request.
        await JSONResponse(body, 403, {"Connection": "close"})(scope, receive, send)
