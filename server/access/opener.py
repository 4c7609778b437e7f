"""Opens a request at the outermost layer, if its key, the access log or the traces need to know."""

from functools import partial

import structlog
from starlette.types import Receive, Scope

from server.access.access_log import AccessLog, Routes, facts_of
from server.access.open_request import OpenRequest, SpanSource, open_request

_log = structlog.get_logger(__name__)


class RequestOpener:
    """Makes open requests; there is none if keys, log and traces are all not configured."""

    def __init__(
        self, log: AccessLog | None, spans: SpanSource | None, routes: Routes, *, has_keys: bool
    ) -> None:
        self._log = log
        self._spans = spans
        self._routes = routes
        self._has_keys = has_keys

    def opened(self, scope: Scope, receive: Receive) -> OpenRequest | None:
        """Make the request the current one and return it; None if nothing needs it."""
        log = self._log if self._log is not None and self._log.is_logged(scope) else None
        spans = None
        if self._spans is not None and self._is_generating(scope):
            spans = self._spans.begin(scope)
        if log is None and spans is None and not self._has_keys:
            return None
        opened = OpenRequest(receive, partial(self._closed, scope, log), spans)
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
