"""The engine without its thread: requests in, steps, outputs out.

A step is: schedule, run, choose tokens, tell. Nothing here is safe to call from two threads.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog
import torch
from torch import Tensor

from model_runtime.answer import Answer
from model_runtime.batch import Span
from model_runtime.config import EngineConfig
from model_runtime.errors import GrammarError
from model_runtime.grammar import Constraint
from model_runtime.observer import Observer
from model_runtime.pacing import Pacing
from model_runtime.request import (
    FinishReason,
    OnOutput,
    Output,
    PromptProgress,
    TokenLogprob,
)
from model_runtime.sampler import SamplingRow, has_penalty, logprobs, sample
from model_runtime.scheduler import Chunk, Plan, Scheduler
from model_runtime.sequence import Sequence as TokenSequence
from rope import Profile

_log = structlog.get_logger(__name__)


class Runner(Protocol):
    """What runs a step: a ModelRunner, or whatever a test puts in its place."""

    def table_slot(self, profile: Profile) -> int:
        """The slot of a profile's rotation table."""

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Logits [R, V] of the rows that the spans ask for."""


@dataclass(slots=True)
class Live:
    """A request inside the engine."""

    sequence: TokenSequence
    answer: Answer
    on_output: OnOutput
    constraint: Constraint | None = None  # where the answer has a grammar
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    last_token: float | None = None
    _prompt_vocabulary: tuple[int, ...] | None = None  # the prompt's tokens, each once

    def sampling_row(self) -> SamplingRow:
        """What the choice of the next token depends on."""
        sequence, params = self.sequence, self.sequence.request.sampling
        allowed = None if self.constraint is None else self.constraint.allowed
        if not has_penalty(params):
            return SamplingRow(params, sequence.num_generated, self.answer.end_ids, allowed=allowed)
        if self._prompt_vocabulary is None:
            self._prompt_vocabulary = tuple(set(sequence.request.prompt_ids))
        return SamplingRow(
            params,
            sequence.num_generated,
            self.answer.end_ids,
            sequence.token_ids[sequence.num_prompt_tokens :],
            self._prompt_vocabulary,
            allowed,
        )


class _OutOfMemoryError(Exception):
    """A forward pass found no memory."""


class EngineCore:
    """Owner of every live request."""

    def __init__(self, runner: Runner, config: EngineConfig, observer: Observer) -> None:
        self._runner = runner
        self._observer = observer
        self.scheduler = Scheduler(config)
        self._pacing = Pacing(config.step_target_s, config.max_num_batched_tokens)
        self._live: dict[str, Live] = {}
        self._is_retrying = False  # the step before this one ran out of memory

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._live

    def add(self, live: Live) -> None:
        """Queue a request."""
        self._live[live.sequence.request.request_id] = live
        self.scheduler.add(live.sequence)

    def abort(self, request_id: str) -> None:
        """End a request and free its pages; harmless if it is already over."""
        live = self._live.get(request_id)
        if live is not None:
            self._deliver(live, Output(finish_reason=FinishReason.ABORT))

    def fail_all(self, error: str) -> None:
        """End every request with an error."""
        for live in list(self._live.values()):
            self._deliver(live, Output(finish_reason=FinishReason.ERROR, error=error))

    def step(self) -> int:
        """One step. Returns how many sequences took part; a step that fails fails those only.

        One that runs out of memory preempts the newest sequence and is tried again, once.
        """
        began = time.monotonic()
        plan = self.scheduler.schedule(
            starts_waiting=not self._is_retrying, num_prefill_tokens=self._pacing.num_tokens
        )
        chunks = list(plan.chunks.values())
        num_prefill_tokens = plan.num_prefill_tokens
        self._note_plan(plan)
        if chunks:
            try:
                self._run(chunks)
                self._is_retrying = False
            except _OutOfMemoryError:
                self._is_retrying = not self._is_retrying and self._make_room()
                if not self._is_retrying:
                    self._fail(chunks, "out of memory in a step of the engine")
            except Exception as error:  # noqa: BLE001  # whatever a model's forward may raise
                _log.exception("step_failed", num_sequences=len(chunks))
                self._fail(chunks, f"{type(error).__name__} in a step of the engine")
        self._pacing.note(num_prefill_tokens, time.monotonic() - began)
        self.tell_gauges()
        return len(chunks)

    def _make_room(self) -> bool:
        """Preempt the newest sequence; False when there is no other to go on."""
        preempted = self.scheduler.preempt_newest()
        if preempted is not None:
            _log.warning("out_of_memory", preempted=preempted.request.request_id)
            self._observer.preempted(preempted.request)
        return preempted is not None

    def tell_gauges(self) -> None:
        """Report the queues and the cache."""
        scheduler = self.scheduler
        self._observer.stepped(
            len(scheduler.running), len(scheduler.waiting), scheduler.pool.num_used
        )

    def check_integrity(self) -> None:
        """What is live is what the scheduler knows. Raises AssertionError."""
        self.scheduler.check_integrity()
        known = [*self.scheduler.running, *self.scheduler.waiting]
        assert {id(live.sequence) for live in self._live.values()} == {id(each) for each in known}

    def _run(self, chunks: Sequence[Chunk]) -> None:
        lives = [self._live[chunk.sequence.request.request_id] for chunk in chunks]
        spans = [self._span(chunk) for chunk in chunks]
        logits_RV = self._forward(spans)
        ended: list[Live] = []
        choosing: list[tuple[Live, int]] = []  # who gets a token, from which row
        is_finite_R: list[bool] = logits_RV.isfinite().all(dim=-1).tolist()
        row = 0
        for chunk, live, span in zip(chunks, lives, spans, strict=True):
            rows = slice(row, row + len(span.logit_rows))
            row = rows.stop
            if not all(is_finite_R[rows]):
                self.scheduler.distrust_cache()
                self._observer.nan_aborted(chunk.sequence.request)
                error = "the model answered with NaN or Inf"
                self._deliver(live, Output(finish_reason=FinishReason.ERROR, error=error))
                continue
            if chunk.is_scored:
                _score_prompt(chunk, live.answer, logits_RV[rows])
            if chunk.is_last and chunk.sequence.request.sampling.max_tokens == 0:
                ended.append(live)
            elif chunk.is_last:
                choosing.append((live, row - 1))
            self.scheduler.computed(chunk)
            if chunk.sequence.request.wants_progress and not chunk.sequence.num_generated:
                self._deliver(live, Output(progress=_progress(live)))
        for live in ended:
            self._deliver(live, live.answer.end_without_tokens())
        choosing = [each for each in choosing if self._may_go_on(each[0])]
        if choosing:
            self._choose(logits_RV[[at for _, at in choosing]], [live for live, _ in choosing])

    def _forward(self, spans: Sequence[Span]) -> Tensor:
        try:
            return self._runner.run(spans)
        except (RuntimeError, MemoryError) as error:  # torch's own of a device is the former
            if not _is_out_of_memory(error):
                raise
            # Nothing of the step has been noted yet, so it can be tried again.
            raise _OutOfMemoryError from error

    def _span(self, chunk: Chunk) -> Span:
        sequence = chunk.sequence
        logit_rows = range(0)
        if chunk.is_scored:
            logit_rows = range(max(sequence.num_scored - chunk.first, 0), chunk.num_tokens)
        elif chunk.is_last:
            logit_rows = range(chunk.num_tokens - 1, chunk.num_tokens)
        return Span(
            sequence.token_ids[chunk.first : chunk.first + chunk.num_tokens],
            chunk.first,
            sequence.pages,
            self._runner.table_slot(chunk.tier.profile),
            logit_rows,
        )

    def _may_go_on(self, live: Live) -> bool:
        """Find what the answer's grammar lets follow; False if the answer has ended with that."""
        if live.constraint is None:
            return True
        try:
            if live.constraint.look():
                return True
            output = live.answer.complete()
        except GrammarError as error:
            output = _fault_of_grammar(live, error)
        self._deliver(live, output)
        return False

    def _choose(self, logits_RV: Tensor, lives: Sequence[Live]) -> None:
        """One new token for each, and its logprob where it was asked for."""
        params = [live.sequence.request.sampling for live in lives]
        token_ids = sample(logits_RV, [live.sampling_row() for live in lives])
        reported: dict[int, TokenLogprob] = {}
        wanted = [index for index, each in enumerate(params) if each.logprobs is not None]
        if wanted:
            chosen = [token_ids[index] for index in wanted]
            num_top = [params[index].logprobs or 0 for index in wanted]
            found = logprobs(logits_RV[wanted], chosen, num_top)
            reported = dict(zip(wanted, found, strict=True))
        for index, (live, token_id) in enumerate(zip(lives, token_ids, strict=True)):
            live.sequence.token_ids.append(token_id)
            self._note_token(live)
            try:
                constraint = live.constraint
                is_complete = constraint is not None and constraint.advance(token_id)
                output = live.answer.add(token_id, reported.get(index), is_complete=is_complete)
            except GrammarError as error:
                output = _fault_of_grammar(live, error)
            except Exception as error:  # noqa: BLE001  # a tokenizer's fault ends its request only
                _log.exception("answer_failed", request_id=live.sequence.request.request_id)
                text = f"{type(error).__name__} while decoding a token"
                output = Output(finish_reason=FinishReason.ERROR, error=text)
            self._deliver(live, output)

    def _deliver(self, live: Live, output: Output) -> None:
        """Hand an output over; the last one frees the request."""
        sequence = live.sequence
        if output.finish_reason is not None:
            self.scheduler.remove(sequence)
            del self._live[sequence.request.request_id]
            seconds = time.monotonic() - live.arrived
            self._observer.finished(
                sequence.request,
                sequence.tier,
                output.finish_reason,
                sequence.num_generated,
                seconds,
            )
        state = replace(
            output,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            tier=sequence.tier,
            num_rescales=sequence.num_rescales,
        )
        try:
            live.on_output(state)
        except Exception:  # noqa: BLE001  # a listener's fault is no reason to stop the others
            _log.exception("listener_failed", request_id=sequence.request.request_id)

    def _fail(self, chunks: Sequence[Chunk], error: str) -> None:
        for chunk in chunks:
            live = self._live.get(chunk.sequence.request.request_id)
            if live is not None:  # else it ended before the step failed
                self._deliver(live, Output(finish_reason=FinishReason.ERROR, error=error))

    def _note_plan(self, plan: Plan) -> None:
        now = time.monotonic()
        for sequence in plan.preempted:
            self._observer.preempted(sequence.request)
        for sequence in plan.rescaled:
            self._observer.rescaled(sequence.request)
        for sequence in plan.chunks:
            live = self._live[sequence.request.request_id]
            if live.started is None:
                live.started = now
                waited = now - live.arrived
                self._observer.started(sequence.request, sequence.num_cached_tokens or 0, waited)

    def _note_token(self, live: Live) -> None:
        now = time.monotonic()
        request = live.sequence.request
        if live.last_token is None:
            started = live.arrived if live.started is None else live.started
            self._observer.first_token(request, now - live.arrived, now - started)
        else:
            context_len = len(live.sequence.token_ids)
            self._observer.next_token(request, context_len, now - live.last_token)
        live.last_token = now


def _fault_of_grammar(live: Live, error: GrammarError) -> Output:
    _log.error("grammar_failed", request_id=live.sequence.request.request_id, error=str(error))
    return Output(finish_reason=FinishReason.ERROR, error=str(error))


def _is_out_of_memory(error: Exception) -> bool:
    """A device's own error; of a CPU's allocator torch makes a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _progress(live: Live) -> PromptProgress:
    sequence = live.sequence
    began = live.arrived if live.started is None else live.started
    return PromptProgress(
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens or 0,
        sequence.num_computed,
        time.monotonic() - began,
    )


def _score_prompt(chunk: Chunk, answer: Answer, logits_RV: Tensor) -> None:
    """Each row says how likely the token after it was; the prompt's last has none after it.

    A sequence that was preempted in its prompt has delivered the first of them before.
    """
    sequence = chunk.sequence
    first = max(chunk.first, sequence.num_scored)
    end = min(chunk.first + chunk.num_tokens, sequence.num_prompt_tokens)
    following = sequence.request.prompt_ids[first + 1 : end + 1]
    num_top = [sequence.request.sampling.prompt_logprobs or 0] * len(following)
    answer.add_prompt_logprobs(logprobs(logits_RV[: len(following)], following, num_top))
    sequence.num_scored = max(sequence.num_scored, end)
