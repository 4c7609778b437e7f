"""The errors of the runtime. `server/errors.py` maps them to HTTP responses.

RopewalkError
|-- ModelError               a checkpoint cannot be served: the process ends with code 2
|-- RequestError             the caller's mistake; names field, limit and value
|   |-- ContextLengthError   more positions than max_model_len or the longest tier covers
|   |-- CacheCapacityError   more positions than the whole cache holds, within max_model_len
|   |-- TemplateLimitError   the chat template exceeds its time on these messages
|   |-- RequestTimeoutError  the request's time was over before its first token
|   `-- UnknownModelError    no deployment of that name
|-- QueueFullError           try again later
|-- EngineStoppedError       the engine ended, or a step of it failed
`-- GrammarError             an answer's grammar cannot continue: that answer ends
"""

from typing import Any


class RopewalkError(Exception):
    """The base class of the errors that this package raises."""


class ModelError(RopewalkError):
    """A checkpoint cannot be served."""


class RequestError(RopewalkError):
    """A request cannot be served as it was sent."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.details = details or {}  # numbers for the error body, beside the message


class ContextLengthError(RequestError):
    """Prompt and max_tokens do not fit max_model_len, or the tiers that the request names."""


class CacheCapacityError(RequestError):
    """Prompt and max_tokens fit max_model_len, but not the whole cache."""


class TemplateLimitError(RequestError):
    """The chat template takes more time for the messages than it may."""

    def __init__(self, excess: str) -> None:
        """`excess` begins with a verb, as "takes more than ..."."""
        super().__init__(f"`messages`: the model's chat template {excess}", param="messages")
        self.excess = excess


class RequestTimeoutError(RequestError):
    """The request's time was over before its first token."""


class UnknownModelError(RequestError):
    """No deployment has this name."""


class QueueFullError(RopewalkError):
    """As many requests wait as the operator allows."""


class EngineStoppedError(RopewalkError):
    """The engine is not running, or failed while it served the request."""


class OutputNotReadError(RopewalkError):
    """The client of a stream did not read it, and too much of it waited."""


class GrammarError(RopewalkError):
    """The matcher of an answer's grammar failed, or it allows no token."""
