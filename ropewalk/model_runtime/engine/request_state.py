"""The state of the requests inside the engine, and the delivery of their outputs."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from ropewalk.model_runtime.attention.batch import PageRow
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.output_processor import Answer
from ropewalk.model_runtime.request import (
    FinishReason,
    OnOutput,
    Output,
    PromptProgress,
    Request,
    Timings,
)
from ropewalk.model_runtime.runner.bad_words import barred_after, num_before
from ropewalk.model_runtime.runner.penalties import SeenTokens, has_penalty
from ropewalk.model_runtime.runner.sampler import SamplingRow
from ropewalk.model_runtime.scheduling.drafts.drafter import Drafter
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import Sequence as TokenSequence
from ropewalk.model_runtime.text.grammar import Constraint
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.rope import Tier

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class RequestState:
    """The state of one request inside the engine."""

    sequence: TokenSequence
    answer: Answer
    on_output: OnOutput
    constraint: Constraint | None = None  # None: the answer has no grammar
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    last_token: float | None = None
    page_row: PageRow = field(default_factory=PageRow)
    table: tuple[Tier | None, int] = (None, 0)  # the newest tier, and the id of its table
    is_plain: bool = False  # a decode's token needs no logprobs and no grammar
    # Plain, and a token's draw does not depend on those before it. So the next token can be sampled
    # before the host knows the last one. There is a next token.
    is_memoryless: bool = False
    drafter: Drafter | None = None  # None: nothing was proposed yet
    _row: SamplingRow | None = None
    _num_before: int = 0  # last tokens of the answer that the barred ones depend on

    def __post_init__(self) -> None:
        params = self.sequence.request.sampling
        self.is_plain = self.constraint is None and params.logprobs is None
        self._num_before = num_before(params)
        has_memory = bool(self._num_before) or has_penalty(params)
        self.is_memoryless = self.is_plain and not has_memory and params.max_tokens > 0

    @classmethod
    def of(
        cls,
        request: Request,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        on_output: OnOutput,
    ) -> "RequestState":
        """Build the state of a new request."""
        answer = Answer(request, tokenizer, eos_token_ids)
        constraint = None
        if request.grammar is not None:
            constraint = request.grammar.begin(answer.end_ids, request.sampling.allowed)
        state = cls(TokenSequence(request), answer, on_output, constraint)
        if request.wants_timings:
            state.on_output = _Timed(state, on_output)
        return state

    @property
    def progress(self) -> PromptProgress:
        """Return how much of the prompt is computed, and the seconds that it took so far."""
        sequence = self.sequence
        began = self.arrived if self.started is None else self.started
        return PromptProgress(
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens or 0,
            sequence.num_computed,
            time.monotonic() - began,
        )

    def add_token(self, token_id: int) -> None:
        self.sequence.token_ids.append(token_id)
        if self._row is not None and self._row.seen is not None:
            self._row.seen.add(token_id)

    def sampling_row(self, num_unknown: int = 0) -> SamplingRow:
        """Return the inputs for sampling the next token, apart from its logits.

        `num_unknown`: tokens that the device has still to compute before that token.
        """
        sequence = self.sequence
        if self._row is None:
            params = sequence.request.sampling
            seen = None
            if has_penalty(params):
                # The prompt's tokens count for repetition only.
                prompt = sequence.request.prompt_ids if params.repetition_penalty != 1 else ()
                seen = SeenTokens(prompt, sequence.token_ids[sequence.num_prompt_tokens :])
            self._row = SamplingRow(params, 0, self.answer.end_ids, seen, params.allowed)
        self._row.num_generated = sequence.num_generated + num_unknown
        if self.constraint is not None:
            self._row.allowed = self.constraint.allowed
        if self._num_before:
            first = max(sequence.num_prompt_tokens, len(sequence.token_ids) - self._num_before)
            last_ids = sequence.token_ids[first:]
            self._row.barred = barred_after(sequence.request.sampling, last_ids)
        return self._row


class _Timed:
    """A listener that hears of the times with each output."""

    def __init__(self, state: RequestState, on_output: OnOutput) -> None:
        self._state = state
        self._on_output = on_output
        self._first_token: float | None = None

    def __call__(self, output: Output) -> None:
        state, now = self._state, time.monotonic()
        newest = now if state.last_token is None else state.last_token
        if self._first_token is None and output.token_ids:
            self._first_token = newest
        first = newest if self._first_token is None else self._first_token
        started = first if state.started is None else state.started
        self._on_output(output._replace(timings=Timings(first - started, newest - first)))


class RequestStates:
    """The owner of every live request. Delivering the last output of a request frees it."""

    def __init__(
        self,
        scheduler: Scheduler,
        observer: Observer,
        on_end: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._observer = observer
        self._on_end = on_end  # called before the last output of a request is delivered
        self._live: dict[str, RequestState] = {}
        self._next_deadline = math.inf  # none is earlier; its request may have ended

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> list[RequestState]:
        """Return the live requests, in order of arrival."""
        return list(self._live.values())

    def add(self, state: RequestState) -> None:
        """Queue a request, and note its deadline if it has one."""
        request = state.sequence.request
        self._live[request.request_id] = state
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        self._scheduler.add(state.sequence)

    def get(self, request_id: str) -> RequestState | None:
        return self._live.get(request_id)

    def is_live(self, state: RequestState) -> bool:
        return self._live.get(state.sequence.request.request_id) is state

    def of(self, sequence: TokenSequence) -> RequestState:
        """Return the request of a sequence. It must be live."""
        return self._live[sequence.request.request_id]

    def deliver(self, state: RequestState, output: Output) -> None:
        """Pass an output to the callback; the last output frees the request."""
        if output.finish_reason is not None:
            self._end(state, output.finish_reason)
        if output.tier is None:  # not an output of `Answer.add`
            num_cached_tokens, tier, num_rescales = state.sequence.placed
            output = output._replace(
                num_cached_tokens=num_cached_tokens, tier=tier, num_rescales=num_rescales
            )
        if state.drafter is not None and output.finish_reason is not None:
            output = output._replace(drafts=state.drafter.counts)
        try:
            state.on_output(output)
        except Exception:  # noqa: BLE001  # a listener's fault is no reason to stop the others
            _log.exception("listener_failed", request_id=state.sequence.request.request_id)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        sequence = state.sequence
        self._scheduler.remove(sequence)
        del self._live[sequence.request.request_id]
        self._on_end()
        seconds = time.monotonic() - state.arrived
        self._observer.finished(
            sequence.request, sequence.tier, reason, sequence.num_generated, seconds
        )

    def end_overdue(self, now: float) -> None:
        """End the requests whose time is over, with what they have."""
        if now < self._next_deadline:
            return
        self._next_deadline = math.inf
        for state in self.all():
            deadline = state.sequence.request.deadline
            if deadline is None:
                continue
            if deadline <= now:
                self.deliver(state, state.answer.out_of_time())
            else:
                self._next_deadline = min(self._next_deadline, deadline)

    def fail(self, state: RequestState, error: str) -> None:
        self.deliver(state, Output(finish_reason=FinishReason.ERROR, error=error))

    def note_start(self, state: RequestState, now: float) -> None:
        """Report that the request left the queue, when a step first computes some of it."""
        if state.started is None:
            state.started = now
            sequence, waited = state.sequence, now - state.arrived
            self._observer.started(sequence.request, sequence.num_cached_tokens or 0, waited)
            if sequence.num_under_others:
                self._observer.missed(sequence.request, sequence.num_under_others)

    def note_token(self, state: RequestState, now: float) -> None:
        """Report that the request has a new token."""
        sequence = state.sequence
        if state.last_token is None:
            started = state.arrived if state.started is None else state.started
            self._observer.first_token(sequence.request, now - state.arrived, now - started)
        else:
            gap = now - state.last_token
            self._observer.next_token(sequence.request, len(sequence.token_ids), gap)
        state.last_token = now
