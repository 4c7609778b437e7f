"""Why a request ends before the engine sees it: its key's bounds, or a client that has left."""

from ropewalk.model_runtime.errors import RopewalkError


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was ready."""


class KeyLimitError(RopewalkError):
    """A bound of the request's API key is reached; the request may be sent again later."""

    def __init__(self, message: str, limit: str, value: int, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.details = {"limit": limit, "limit_value": value}  # for the error body
