"""The access log: one line for a request, when its response and its answers have ended.

A line holds no text of a client: no prompt, no answer, no path, no key. Routes are templates, and
a key appears by its configured name.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from starlette.datastructures import Headers
from starlette.types import Scope

from server.access.open_request import OpenRequest
from server.access.trace import trace_id_of

Logged = Literal["requests", "all"]

# Asked every few seconds by machines. With them the log would hide what it is for.
NEVER_LOGGED = frozenset({"/health", "/live", "/ready", "/metrics"})
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_OTHER = "other"
CLIENT_CLOSED_REQUEST = 499  # nginx's number; only metrics and log show it

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Routes:
    """The paths that can be told from a request that no route has seen, as with a wrong key."""

    generating: frozenset[str]
    fixed: frozenset[str]  # all paths without a variable part

    @classmethod
    def of(cls, methods: Mapping[str, Collection[str]]) -> "Routes":
        """Return the routes from their templates with the methods of each."""
        return cls(
            frozenset(
                path
                for path, accepted in methods.items()
                if path.startswith("/v1/") and "POST" in accepted
            ),
            frozenset(path for path in methods if "{" not in path),
        )


def facts_of(scope: Scope, opened: OpenRequest, routes: Routes) -> dict[str, Any]:
    """Return what the log and the traces tell of any request that has ended."""
    template = getattr(scope.get("route"), "path", None)  # set by the router
    path, allowance = scope["path"], opened.allowance
    return {
        "request_id": scope.get("state", {}).get("request_id"),
        "key": None if allowance is None else allowance.name,
        "method": scope["method"] if scope["method"] in _METHODS else _OTHER,
        "route": template or (path if path in routes.fixed else _OTHER),
        "status": opened.status,
        "aborted": opened.is_aborted or opened.status == CLIENT_CLOSED_REQUEST,
    }


class AccessLog:
    """Writes the lines of the requests that it was asked for."""

    def __init__(self, logged: Logged, routes: Routes) -> None:
        self._logs_all = logged == "all"
        self._routes = routes

    def is_logged(self, scope: Scope) -> bool:
        """Return whether a request has a line."""
        path = scope["path"]
        if self._logs_all:
            return path not in NEVER_LOGGED
        return path in self._routes.generating

    def write(self, scope: Scope, opened: OpenRequest) -> None:
        """Write the line of a request that has ended."""
        tier = opened.tier
        facts = {**facts_of(scope, opened, self._routes), "seconds": round(opened.seconds, 4)}
        if opened.spans is not None:
            facts["trace_id"] = opened.spans.trace_id
        elif trace_id := trace_id_of(Headers(scope=scope).get("traceparent", "")):
            facts["trace_id"] = trace_id
        if opened.deployment is not None:
            facts["deployment"] = opened.deployment
        if tier is not None:
            if opened.is_beyond:
                facts["beyond_trained_length"] = True
            first_token_s = opened.first_token_s
            facts |= {
                "rope_type": tier.profile.name,
                "factor": tier.factor,
                "tier": tier.ceiling,
                "prompt_tokens": opened.num_prompt_tokens,
                "cached_tokens": opened.num_cached_tokens,
                "completion_tokens": opened.num_generated,
                "first_token_s": None if first_token_s is None else round(first_token_s, 4),
            }
        _log.info("request", **facts)
