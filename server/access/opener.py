"""Opens a request at the outermost layer, if its key or the access log needs to know of it."""

from functools import partial

from starlette.types import Receive, Scope

from server.access.access_log import AccessLog
from server.access.open_request import OpenRequest, open_request


class RequestOpener:
    """Makes open requests; there is none if neither keys nor the log are configured."""

    def __init__(self, log: AccessLog | None, *, has_keys: bool) -> None:
        self._log = log
        self._has_keys = has_keys

    def opened(self, scope: Scope, receive: Receive) -> OpenRequest | None:
        """Make the request the current one and return it; None if nothing needs it."""
        log = self._log if self._log is not None and self._log.is_logged(scope) else None
        if log is None and not self._has_keys:
            return None
        opened = OpenRequest(receive, _no_line if log is None else partial(log.write, scope))
        open_request(opened)
        return opened


def _no_line(_: OpenRequest) -> None:
    pass
