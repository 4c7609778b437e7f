"""The facts about one HTTP request while it is served, for its key and for the access log.

A route does not hand its HTTP request down to the service, so the open request is kept in a context
variable. It is set only if keys are configured, or the log or the traces are on.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import structlog
from starlette.types import Scope

from ropewalk.model_runtime.request import FinishReason, Request
from ropewalk.rope import Tier
from ropewalk.server.access.allowance import Allowance
from ropewalk.server.metrics import Metrics

_log = structlog.get_logger(__name__)
_current: ContextVar["OpenRequest | None"] = ContextVar("open_request", default=None)


class EndedAnswer(NamedTuple):
    """One answer of a request, when the engine has ended it."""

    tier: Tier
    reason: FinishReason
    num_prompt_tokens: int
    num_generated: int
    num_cached_tokens: int  # of its prompt; 0 if another answer counts them
    queue_s: float | None  # from arrival to the first step; None: it never started
    first_token_s: float | None  # since arrival; None: no token
    is_beyond: bool  # whether it has more positions than its table is made for
    seconds: float  # since arrival
    ended_at: float  # time.monotonic()


class RequestSpans(Protocol):
    """The spans of one request, for a collector of traces."""

    trace_id: str

    def answer_ended(self, ended: EndedAnswer) -> None:
        """Tell the times of one answer."""

    def request_ended(self, opened: "OpenRequest", facts: Mapping[str, str | bool | None]) -> None:
        """Tell what was asked and answered, when nothing of it runs any more."""


class SpanSource(Protocol):
    """The beginning of the spans of each request, and the end of all."""

    def begin(self, scope: Scope) -> RequestSpans:
        """Begin the spans of a request that has arrived."""

    def stop(self) -> None:
        """Send what is left, within a few seconds."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """An HTTP request. Everything happens on the event loop."""

    on_closed: Callable[["OpenRequest"], None]  # when answered, and when its answers have ended
    spans: RequestSpans | None = None
    allowance: Allowance | None = None  # of its key
    deployment: str | None = None
    tier: Tier | None = None  # the longest of its answers
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated: int = 0
    first_token_s: float | None = None
    is_aborted: bool = False
    is_beyond: bool = False  # whether an answer has more positions than its table is made for
    status: int = 0  # 0: not answered yet
    seconds: float = 0.0  # to the last byte of the response
    num_open: int = 0  # answers that the engine still computes
    is_submitted: bool = False

    def submitted(self, num: int, num_prompt_tokens: int) -> None:
        self.num_open, self.num_prompt_tokens, self.is_submitted = num, num_prompt_tokens, True
        if self.allowance is not None:
            self.allowance.used(num_prompt_tokens, 0)

    def answer_ended(self, ended: EndedAnswer) -> None:
        """Note the end of one answer."""
        self.num_open -= 1
        self.num_generated += ended.num_generated
        self.num_cached_tokens += ended.num_cached_tokens
        self.is_aborted |= ended.reason is FinishReason.ABORT
        self.is_beyond |= ended.is_beyond
        if self.tier is None or ended.tier.ceiling > self.tier.ceiling:
            self.tier = ended.tier
        if ended.first_token_s is not None:
            before = self.first_token_s
            self.first_token_s = min(ended.first_token_s, before or ended.first_token_s)
        if self.allowance is not None:
            self.allowance.used(0, ended.num_generated)
            self.allowance.leave(1)
        if self.spans is not None:
            try:
                self.spans.answer_ended(ended)
            except Exception:  # noqa: BLE001  # a trace that is lost costs no request
                _log.exception("spans_failed")
        if self.status and not self.num_open:
            self.on_closed(self)

    def answered(self, status: int, seconds: float) -> None:
        """Note the end of the response. An answer that was aborted may still end later."""
        self.status, self.seconds = status, seconds
        if not self.num_open:
            self.on_closed(self)


def current_request() -> OpenRequest | None:
    """Return the request that this task serves; None if nothing needs it."""
    return _current.get()


def key_name() -> str:
    opened = _current.get()
    return "" if opened is None or opened.allowance is None else opened.allowance.name


def open_request(opened: OpenRequest) -> None:
    """Make a request the current one of this task and of those that it starts."""
    _current.set(opened)


@contextmanager
def admitted(num: int) -> Iterator[None]:
    """Hold the places of `num` answers of the current request's key within the block.

    Answers that the block submits keep their places until they end. Raises what `Allowance.enter`
    raises.
    """
    opened = _current.get()
    allowance = None if opened is None else opened.allowance
    if opened is None or allowance is None:
        yield
        return
    allowance.enter(num)
    try:
        yield
    finally:
        if not opened.is_submitted:
            allowance.leave(num)


Put = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], None]


@dataclass(slots=True)
class _Watched:
    """One answer, as far as the engine's thread has come."""

    opened: OpenRequest
    loop: asyncio.AbstractEventLoop
    counts_prompt: bool  # the first answer to a prompt counts its cached tokens
    num_cached_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None


class AnswerWatch(Metrics):
    """An observer that costs three look-ups an answer, and nothing a token.

    A subclass rather than a second observer, because the engine calls its observer for each token.
    """

    def __init__(self, put: Put, *args: Any) -> None:
        """Take `put`, which queues a callback for an event loop, and the arguments of Metrics."""
        super().__init__(*args)
        self._put = put
        self._watched: dict[str, _Watched] = {}

    def watch(self, requests: Sequence[Request], opened: OpenRequest, num_answers: int) -> None:
        """Report the ends of these requests, which have `num_answers` for each prompt."""
        loop = asyncio.get_running_loop()
        for index, request in enumerate(requests):
            is_first = index % num_answers == 0
            self._watched[request.request_id] = _Watched(opened, loop, is_first)

    def forget(self, requests: Sequence[Request]) -> None:
        """Do not report these requests, which the engine has refused."""
        for request in requests:
            self._watched.pop(request.request_id, None)

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Record a request that left the queue."""
        super().started(request, num_cached_tokens, queue_seconds)
        watched = self._watched.get(request.request_id)
        if watched is not None:
            watched.queue_s = queue_seconds
            if watched.counts_prompt:
                watched.num_cached_tokens = num_cached_tokens

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """Record the first token of a request."""
        super().first_token(request, seconds, prefill_seconds)
        watched = self._watched.get(request.request_id)
        if watched is not None:
            watched.first_token_s = seconds

    def finished(
        self, request: Request, tier: Tier, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """Record a request that ended. The event loop hears of it before its last output."""
        super().finished(request, tier, reason, num_generated, seconds)
        watched = self._watched.pop(request.request_id, None)
        if watched is not None:
            ended = EndedAnswer(
                tier,
                reason,
                len(request.prompt_ids),
                num_generated,
                watched.num_cached_tokens,
                watched.queue_s,
                watched.first_token_s,
                tier.is_beyond(request.positions_with(num_generated)),
                seconds,
                time.monotonic(),
            )
            self._put(watched.loop, partial(watched.opened.answer_ended, ended))
