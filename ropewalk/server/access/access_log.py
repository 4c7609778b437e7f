"""The access log: one line for a request, when its response and its answers have ended.

A line holds no text of a client: no prompt, no answer, no path, no key. Routes are templates, and
a key appears by its configured name.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import structlog
from starlette.datastructures import Headers
from starlette.types import Scope

from ropewalk.server.access.open_request import OpenRequest, SpanSource, open_request

# Version 00 has four fields. A later version may add more after another hyphen.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def trace_id_of(traceparent: str) -> str | None:
    """Return the trace id of a header; None if the header is not valid.

    Source: W3C Trace Context, sections 3.2.2 and 3.2.4. The version ff and ids of zeros are
    invalid.
    """
    found = _FORM.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, parent_id, more = found.groups()
    is_invalid = version == "ff" or (version == "00" and more is not None)
    is_zero = not trace_id.strip("0") or not parent_id.strip("0")
    return None if is_invalid or is_zero else trace_id


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


class RequestOpener:
    """Makes open requests; there is none if keys, log and traces are all not configured."""

    def __init__(
        self, log: AccessLog | None, spans: SpanSource | None, routes: Routes, *, has_keys: bool
    ) -> None:
        self._log = log
        self._spans = spans
        self._routes = routes
        self._has_keys = has_keys

    def opened(self, scope: Scope) -> OpenRequest | None:
        """Make the request the current one and return it; None if nothing needs it."""
        log = self._log if self._log is not None and self._log.is_logged(scope) else None
        spans = None
        if self._spans is not None and self._is_generating(scope):
            spans = self._spans.begin(scope)
        if log is None and spans is None and not self._has_keys:
            return None
        opened = OpenRequest(partial(self._closed, scope, log), spans)
        open_request(opened)
        return opened

    def _is_generating(self, scope: Scope) -> bool:
        return scope["method"] == "POST" and scope["path"] in self._routes.generating

    def _closed(self, scope: Scope, log: AccessLog | None, opened: OpenRequest) -> None:
        if log is not None:
            log.write(scope, opened)
        if opened.spans is not None:
            try:
                opened.spans.request_ended(opened, facts_of(scope, opened, self._routes))
            except Exception:  # noqa: BLE001  # a trace that is lost costs no request
                _log.exception("spans_failed")
