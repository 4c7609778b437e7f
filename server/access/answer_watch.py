"""Metrics of the engine that also tell each open request how its answers ended."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from model_runtime.request import FinishReason, Request
from rope import Tier
from server.access.open_request import EndedAnswer, OpenRequest
from server.metrics import Metrics

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
