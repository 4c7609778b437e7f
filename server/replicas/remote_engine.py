"""The engine client of an API process whose engines are replicas.

A request runs on one replica at a time. If that replica is lost, the request runs again on another
one, and what the client already has is compared and skipped (`continuation.py`). Everything here
runs on one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.admission import AdmissionQueue, Places, check_request
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.errors import EngineStoppedError, RopewalkError
from ropewalk.model_runtime.request import FinishReason, OnOutput, Output, Request
from ropewalk.server.replicas.continuation import DeliveredAnswer, DivergedError
from ropewalk.server.replicas.wire import FULL, MISSING, STOPPED

_log = structlog.get_logger(__name__)


class ReplicaLostError(Exception):
    """A replica ended, or fell silent, while it had a request."""

    def __init__(self, replica: str | None, reason: str) -> None:
        """Take the replica, None if none was chosen, and one of LOST_REASONS."""
        super().__init__(f"{replica or 'no replica'}: {reason}")
        self.replica = replica
        self.reason = reason


Take = Callable[[Output], None]
LOST_REASONS = ("died", "silent", STOPPED, FULL, MISSING, "none_ready")


class Replicas(Protocol):
    """The replicas of the engine, wherever they run."""

    @property
    def num_ready(self) -> int:
        """Return the number of replicas that take requests."""

    @property
    def num_queued_tokens(self) -> int:
        """Return the number of prompt tokens that wait for prefill on all replicas."""

    async def run(
        self, request: Request, waited_s: float, avoid: frozenset[str], take: Take
    ) -> None:
        """Run a request on a replica, but not on one of `avoid`, until its last output.

        `take` gets the outputs. Raises what it raises, ReplicaLostError, or a RopewalkError of the
        engine.
        """


class ReplicaWatch(Protocol):
    """Counts what becomes of requests whose replica was lost."""

    def lost(self, reason: str, *, has_begun: bool) -> None:
        """Count a request that lost its replica, before or after its first output."""

    def continued(self, outcome: str) -> None:
        """Count the outcome of such a request: one of CONTINUED."""


CONTINUED = ("ok", "diverged", "gave_up", "aborted", "failed")
_OUTCOMES = {
    FinishReason.STOP: "ok",
    FinishReason.LENGTH: "ok",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "failed",
    FinishReason.REFUSED: "failed",
}
_UNANSWERED = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.REFUSED)


@dataclass(slots=True)
class _Served:
    """One request and its callback."""

    request: Request
    on_output: OnOutput
    arrived: float  # time.monotonic()
    num_lost: int = 0  # times that it lost its replica
    is_started: bool = False
    num_generated: int = 0
    last_token: float = 0.0  # time.monotonic()
    is_ended: bool = False


class RemoteEngine:
    """An EngineClient over replicas."""

    def __init__(
        self,
        config: EngineConfig,
        replicas: Replicas,
        observer: Observer,
        watch: ReplicaWatch,
        *,
        most_attempts: int,
    ) -> None:
        """Take the config of one replica, and how often a request may lose its replica."""
        self._config = config
        self._replicas = replicas
        self._observer = observer
        self._watch = watch
        self._most_attempts = most_attempts
        self._admission = AdmissionQueue(config)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._after_step: Callable[[], None] = lambda: None

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def is_running(self) -> bool:
        return self._admission.is_open

    @property
    def is_ready(self) -> bool:
        return self._admission.is_open and self._replicas.num_ready > 0

    @property
    def seconds_since_step(self) -> float:
        """Return 0: a replica that makes no step is replaced by its own health check."""
        return 0.0

    def start(
        self,
        on_death: Callable[[], None] = lambda: None,  # noqa: ARG002  # no engine dies here
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Accept requests from now on. `after_step` is called when outputs were delivered."""
        self._after_step = after_step
        self._admission.open()

    def stop(self, timeout_s: float = 30.0) -> None:  # noqa: ARG002  # nothing is waited for
        self._admission.close()
        for task in list(self._tasks.values()):
            task.get_loop().call_soon_threadsafe(task.cancel)

    def reserve(self, num: int) -> AbstractContextManager[Places]:
        """Reserve places; raises as `Engine.reserve`, and EngineStoppedError without a replica."""
        num_ready = self._replicas.num_ready
        if self._admission.is_open and not num_ready:
            raise EngineStoppedError("No replica of the engine is ready.")
        self._admission.num_engines = max(1, num_ready)
        return self._admission.reserve(num)

    def submit_all(
        self,
        requests: Sequence[tuple[Request, OnOutput]],
        arrived: float | None = None,
        places: Places | None = None,
    ) -> None:
        """Start requests, all or none; call it on the event loop. Raises as `Engine.submit_all`."""
        for request, _ in requests:
            check_request(request, self._config)
        self._admission.note_waiting(self._replicas.num_queued_tokens)
        since = time.monotonic() if arrived is None else arrived
        num_prompt_tokens = sum(len(request.prompt_ids) for request, _ in requests)

        def start() -> None:
            for request, on_output in requests:
                served = _Served(request, on_output, since)
                task = asyncio.ensure_future(self._serve(served))
                self._tasks[request.request_id] = task
                # A task that is cancelled before it begins runs none of its own code.
                task.add_done_callback(partial(self._done, served))

        self._admission.submit(len(requests), num_prompt_tokens, places, start)

    def abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def _serve(self, served: _Served) -> None:
        """Run a request to its last output."""
        try:
            await self._run(served)
        except RopewalkError as error:
            self._fail(served, str(error))
        except Exception as error:  # noqa: BLE001  # it is logged, and ends its request
            _log.exception("request_failed", request_id=served.request.request_id)
            self._fail(served, f"{type(error).__name__} between the API and an engine")

    def _done(self, served: _Served, _: asyncio.Task[None]) -> None:
        """Forget a task; the request of one that was cancelled ends here."""
        del self._tasks[served.request.request_id]
        if served.is_ended:
            return
        if self._admission.is_open:
            self._deliver(served, Output(finish_reason=FinishReason.ABORT))
            self._after_step()
        else:
            self._fail(served, "the engine stopped")

    async def _run(self, served: _Served) -> None:
        answer, avoid = DeliveredAnswer(), set[str]()
        while not served.is_ended:
            try:
                await self._run_once(served, answer, frozenset(avoid))
            except ReplicaLostError as lost:
                served.num_lost += 1
                self._watch.lost(lost.reason, has_begun=answer.has_begun)
                _log.warning(
                    "replica_lost",
                    request_id=served.request.request_id,
                    replica=lost.replica,
                    reason=lost.reason,
                    tokens_sent=answer.num_tokens,
                )
                if served.num_lost > self._most_attempts or lost.reason == "none_ready":
                    error = f"the replica of the request was lost ({lost.reason})"
                    self._fail(served, error, "gave_up")
                    return
                if lost.replica is not None and lost.reason != FULL:
                    avoid.add(lost.replica)
                answer.begin_again()
            except DivergedError:
                error = "another replica gave other tokens than those already sent"
                self._fail(served, error, "diverged")
                return

    async def _run_once(
        self, served: _Served, answer: DeliveredAnswer, avoid: frozenset[str]
    ) -> None:
        """Run a request on one replica, and deliver what is new."""

        def take(output: Output) -> None:
            for new in answer.take(output):
                self._note(served, new)
                self._deliver(served, new)

        waited_s = time.monotonic() - served.arrived
        await self._replicas.run(served.request, waited_s, avoid, take)

    def _note(self, served: _Served, output: Output) -> None:
        """Tell the observer what the client gets."""
        num_new, request = len(output.token_ids), served.request
        if not served.is_started and output.finish_reason not in _UNANSWERED:
            served.is_started = True
            self._observer.started(request, output.num_cached_tokens, 0.0)
        if not num_new:
            return
        now = time.monotonic()
        if served.num_generated:
            num_tokens = len(request.prompt_ids) + served.num_generated + num_new
            self._observer.next_token(request, num_tokens, now - served.last_token)
        else:
            seconds = now - served.arrived
            self._observer.first_token(request, seconds, seconds)
        served.num_generated += num_new
        served.last_token = now

    def _fail(self, served: _Served, error: str, outcome: str | None = None) -> None:
        """End a request with an error; `outcome` is what becomes of one that lost its replica."""
        self._deliver(served, Output(finish_reason=FinishReason.ERROR, error=error), outcome)
        self._after_step()

    def _deliver(self, served: _Served, output: Output, outcome: str | None = None) -> None:
        """Pass an output on; the last one gives its place in the queue back."""
        if served.is_ended:
            return
        if output.finish_reason is not None:
            served.is_ended = True
            self._admission.ended()
            if served.num_lost:
                self._watch.continued(outcome or _OUTCOMES[output.finish_reason])
            request = served.request
            tier = output.tier or request.placement.tier
            seconds = time.monotonic() - served.arrived
            self._observer.finished(
                request, tier, output.finish_reason, served.num_generated, seconds
            )
        served.on_output(output)
