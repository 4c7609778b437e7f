"""The engine without its thread: requests in, steps, outputs out.

A step is scheduled, runs, and its logits are processed (`postprocess.py`). Nothing here is
thread-safe.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import structlog
import torch
from torch import Tensor

from model_runtime.batch import Span
from model_runtime.config import EngineConfig
from model_runtime.engine.observer import Observer
from model_runtime.engine.postprocess import Postprocessor
from model_runtime.engine.request_state import RequestState, RequestStates
from model_runtime.request import FinishReason, Output
from model_runtime.runner.step_timer import StepTimer
from model_runtime.scheduling.prefill_budget import PrefillBudget
from model_runtime.scheduling.scheduler import Chunk, Plan, Scheduler
from rope import Profile

_log = structlog.get_logger(__name__)


class Runner(Protocol):
    """The interface that runs a step: a ModelRunner, or a test's replacement."""

    def table_slot(self, profile: Profile) -> int:
        """Return the slot of a profile's rotation table."""

    def run(self, spans: Sequence[Span], clock: StepTimer) -> Tensor:
        """Return the logits [R, V] of the rows that the spans request.

        `clock`: the implementation switches it to `forward` when the batch is built.
        """


class _OutOfMemoryError(Exception):
    """A forward pass ran out of memory."""


class EngineCore:
    """The owner of every live request."""

    def __init__(self, runner: Runner, config: EngineConfig, observer: Observer) -> None:
        self._runner = runner
        self._observer = observer
        self._clock = StepTimer()
        self.scheduler = Scheduler(config)
        self._pacing = PrefillBudget(config.step_target_s, config.max_num_batched_tokens)
        self._requests = RequestStates(self.scheduler, observer, self._clock)
        self._outcome = Postprocessor(self._requests, self.scheduler, observer, self._clock)
        self._is_retrying = False  # the previous step ran out of memory

    @property
    def is_idle(self) -> bool:
        """Return whether no request is waiting or running."""
        return not self._requests

    def add(self, live: RequestState) -> None:
        """Queue a request."""
        self._requests.add(live)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; no effect if it has already ended."""
        live = self._requests.get(request_id)
        if live is not None:
            self._requests.deliver(live, Output(finish_reason=FinishReason.ABORT))

    def fail_all(self, error: str) -> None:
        """End every request with an error."""
        for live in self._requests.all():
            self._requests.fail(live, error)

    def step(self) -> int:
        """Run one step and return the number of its sequences.

        If a step fails, then only its own sequences fail. If it runs out of memory, then the
        newest sequence is preempted and the step is retried once.
        """
        self._clock.switch("schedule")
        plan = self.scheduler.schedule(
            starts_waiting=not self._is_retrying,
            num_prefill_tokens=self._pacing.num_tokens(self.scheduler.num_decodes),
        )
        chunks = list(plan.chunks.values())
        self._note_plan(plan)
        is_done = False
        if chunks:
            try:
                self._run(chunks)
                self._is_retrying = False
                is_done = True
            except _OutOfMemoryError:
                self._pacing.note_failure(plan.num_prefill_tokens)
                self._is_retrying = not self._is_retrying and self._make_room()
                if not self._is_retrying:
                    self._fail(chunks, "out of memory in a step of the engine")
            except Exception as error:  # noqa: BLE001  # whatever a model's forward may raise
                _log.exception("step_failed", num_sequences=len(chunks))
                self._fail(chunks, f"{type(error).__name__} in a step of the engine")
        self._clock.switch("deliver")
        self.update_gauges()
        seconds = self._clock.take()
        if chunks:
            self._observer.timed(seconds)
        if is_done:
            self._pacing.note(plan.num_prefill_tokens, sum(seconds.values()))
        return len(chunks)

    def _make_room(self) -> bool:
        """Preempt the newest sequence; return False if no other sequence runs."""
        preempted = self.scheduler.preempt_newest()
        if preempted is not None:
            _log.warning("out_of_memory", preempted=preempted.request.request_id)
            self._observer.preempted(preempted.request)
        return preempted is not None

    def update_gauges(self) -> None:
        """Report the sizes of the queues and the pages in use."""
        scheduler = self.scheduler
        self._observer.stepped(
            len(scheduler.running), len(scheduler.waiting), scheduler.pool.num_used
        )

    def check_integrity(self) -> None:
        """Check that the live requests are those of the scheduler. Raises AssertionError."""
        self.scheduler.check_integrity()
        known = [*self.scheduler.running, *self.scheduler.waiting]
        assert {id(live.sequence) for live in self._requests.all()} == {id(each) for each in known}

    def _run(self, chunks: Sequence[Chunk]) -> None:
        self._clock.switch("build")
        lives = [self._requests.of(chunk.sequence) for chunk in chunks]
        spans = [self._span(*each) for each in zip(chunks, lives, strict=True)]
        logits_RV = self._forward(spans)
        num_rows = [len(span.logit_rows) for span in spans]
        self._outcome.settle(list(zip(chunks, lives, num_rows, strict=True)), logits_RV)

    def _forward(self, spans: Sequence[Span]) -> Tensor:
        try:
            return self._runner.run(spans, self._clock)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not _is_out_of_memory(error):
                raise
            # The step has changed no state yet, so it can be retried.
            raise _OutOfMemoryError from error

    def _span(self, chunk: Chunk, live: RequestState) -> Span:
        sequence = chunk.sequence
        logit_rows = range(0)
        if chunk.is_scored:
            logit_rows = range(max(sequence.num_scored - chunk.first, 0), chunk.num_tokens)
        elif chunk.is_last:
            logit_rows = range(chunk.num_tokens - 1, chunk.num_tokens)
        return Span(
            sequence.token_ids[chunk.first : chunk.first + chunk.num_tokens],
            chunk.first,
            live.page_row.follow(sequence.pages),
            self._runner.table_slot(chunk.tier.profile),
            logit_rows,
        )

    def _fail(self, chunks: Sequence[Chunk], error: str) -> None:
        for chunk in chunks:
            live = self._requests.get(chunk.sequence.request.request_id)
            if live is not None:  # None: it ended before the step failed
                self._requests.fail(live, error)

    def _note_plan(self, plan: Plan) -> None:
        now = time.monotonic()
        for sequence in plan.preempted:
            self._observer.preempted(sequence.request)
        for sequence in plan.rescaled:
            self._observer.rescaled(sequence.request)
        for sequence in plan.chunks:
            self._requests.note_start(self._requests.of(sequence), now)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; a CPU allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
