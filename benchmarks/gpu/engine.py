"""The engine under measurement, with the time of every step.

A model runner times its forwards on their device, without a wait for it.
"""

import gc
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, OnOutput, Output, Request, SamplingParams
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.step_timer import Part
from ropewalk.model_runtime.text.grammar import Grammar


@dataclass(slots=True)
class Forwards:
    """The prompt tokens of the last forward, and the seconds of those that were not looked at.

    An engine that is ahead of a device has launched a forward that has not ended.
    """

    num_prompt: int = 0
    timings: deque[Callable[[], float | None]] = field(default_factory=deque)

    def take(self) -> float | None:
        """Return the seconds of the oldest forward; None if there is none that has ended."""
        seconds = self.timings[0]() if self.timings else None
        if seconds is not None:
            self.timings.popleft()
        return seconds


def timed(forwards: Forwards) -> type[ModelRunner]:
    """Return a runner with a pair of events round each forward. Nothing waits for them."""

    class Timed(ModelRunner):
        def prepare(
            self, spans: Sequence[Span], token_S: Tensor | None = None
        ) -> Callable[[], Tensor]:
            """See ModelRunner."""
            forward = super().prepare(spans, token_S)
            lengths = [len(span.token_ids) for span in spans]
            forwards.num_prompt = sum(length for length in lengths if length > 1)

            def run() -> Tensor:
                done = _stopwatch(self._device)
                logits = forward()
                forwards.timings.append(done())
                return logits

            return run

    return Timed


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float | None]]:
    """Begin to measure; the result ends it, and returns a function that tells the seconds.

    That function returns None as long as the device has not come to the end.
    """
    if device.type != "cuda":
        begin = time.perf_counter()

        def took() -> Callable[[], float | None]:
            seconds = time.perf_counter() - begin
            return lambda: seconds

        return took
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()

    def recorded() -> Callable[[], float | None]:
        last.record()

        def ended() -> float | None:
            is_done = last.query()  # type: ignore[no-untyped-call]
            return first.elapsed_time(last) / 1e3 if is_done else None

        return ended

    return recorded


_WAIT_S = 300  # seconds to wait for the end of the next answer


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, timed from the end of the step before it."""

    seconds: float
    num_tokens: int  # answer tokens
    num_first: int  # first tokens of answers among them
    num_crossed: int  # requests that changed their table in this step
    num_prompt: int = 0  # prompt tokens that it computed
    device_s: float | None = None  # from the first kernel of the forward to the last, if it ran one
    parts: Mapping[str, float] = field(default_factory=dict)  # the engine's own times by part


@dataclass(frozen=True, slots=True)
class Served:
    """The times of requests that were sent together."""

    seconds: float  # from sending to the last token
    first_token_s: float  # from sending to the last first token
    steps: tuple[Step, ...]
    answers: tuple[tuple[int, ...], ...]  # token ids, in the order of the prompts
    num_drafted: int = 0  # tokens of drafts
    num_accepted: int = 0

    @property
    def decode_tokens_s(self) -> float:
        """Return the tokens a second after the last first token."""
        num_tokens = sum(len(answer) - 1 for answer in self.answers)
        return num_tokens / (self.seconds - self.first_token_s)

    def decode_s(self, num_sequences: int) -> list[float]:
        """Return the times of steps that only decoded all sequences, without a tier change."""
        return [
            step.seconds
            for step in self.steps
            if step.num_tokens == num_sequences and not step.num_first and not step.num_crossed
        ]

    def decode_median_s(self, num_sequences: int) -> float:
        """Return the median of `decode_s`. Raises ValueError if it is empty."""
        found = self.decode_s(num_sequences)
        if not found:
            raise ValueError(f"no step decoded {num_sequences} sequences and nothing else")
        return median(found)

    def summary(self, num_sequences: int) -> dict[str, Any]:
        """Return medians of steps that only decoded all sequences: whole, device, host, parts.

        The host's time is the step's without the forward on the device. Sampling counts as host.
        """
        return _summary(
            [
                step
                for step in self.steps
                if step.num_tokens == num_sequences and not step.num_first and not step.num_crossed
            ]
        )

    def mixed_summary(self) -> dict[str, Any]:
        """Return the same of steps that decoded and also computed tokens of prompts."""
        return _summary(
            [step for step in self.steps if step.num_prompt and step.num_tokens > step.num_first]
        )

    def crossing_s(self) -> float:
        """Return the time of the one step that read the cache under a new table."""
        (step,) = (step for step in self.steps if step.num_crossed)
        return step.seconds


def _summary(steps: Sequence[Step]) -> dict[str, Any]:
    if not steps:
        return {"steps": 0}
    device = [step.device_s for step in steps if step.device_s is not None]
    whole, device_s = median(step.seconds for step in steps), median(device) if device else None
    return {
        "steps": len(steps),
        "step_s": whole,
        "device_s": device_s,
        "host_s": None if device_s is None else whole - device_s,
        "parts_s": {name: median(step.parts[name] for step in steps) for name in steps[0].parts},
    }


class _Parts(Observer):
    """Keeps the engine's own times of the last step, and counts tokens of drafts."""

    def __init__(self) -> None:
        self.last: Mapping[str, float] = {}
        self.num_drafted = self.num_accepted = 0

    def speculated(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def timed(self, seconds: Mapping[Part, float]) -> None:
        self.last = {str(name): value for name, value in seconds.items()}


@dataclass(slots=True)
class _Mark:
    """The end of a step, with what happened since the mark before."""

    at: float
    num_tokens: int
    num_first: int
    num_crossed: int
    num_prompt: int
    device_s: float | None
    parts: Mapping[str, float]


@dataclass(slots=True)
class _Watch:
    """Counts that the engine's thread writes while it serves; they are read after the last step."""

    num_left: int
    ended: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    marks: list[_Mark] = field(default_factory=list)
    rescales: dict[int, int] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    num_all: int = 0  # answer tokens of all steps
    num_tokens: int = 0
    num_first: int = 0
    num_crossed: int = 0

    def collector(self, index: int) -> OnOutput:
        """Return the callback that receives the outputs of one request."""

        def collect(output: Output) -> None:
            if output.num_rescales > self.rescales.get(index, 0):
                self.rescales[index] = output.num_rescales
                self.num_crossed += 1
            if output.token_ids:
                self.num_first += index not in self.answers
                self.answers.setdefault(index, []).extend(output.token_ids)
            self.num_tokens += len(output.token_ids)
            self.num_all += len(output.token_ids)
            if output.finish_reason is not None:
                is_whole = output.finish_reason is FinishReason.LENGTH
                self.ended.put(None if is_whole else output.error or str(output.finish_reason))

        return collect

    def mark(self, forwards: Forwards, parts: Mapping[str, float]) -> None:
        """Record the end of a step, and reset the counts."""
        now, device_s = time.perf_counter(), forwards.take()
        counts = (self.num_tokens, self.num_first, self.num_crossed, forwards.num_prompt)
        self.marks.append(_Mark(now, *counts, device_s, parts))
        self.num_tokens = self.num_first = self.num_crossed = 0
        forwards.num_prompt = 0


class Measured:
    """One engine over a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, deployment: Deployment, config: EngineConfig
    ) -> None:
        self._deployment = deployment
        self._ids = itertools.count()
        self._watch = _Watch(0)
        profiles = [tier.profile for tier in deployment.own_tiers]
        self._parts, self._forwards = _Parts(), Forwards()
        make = timed(self._forwards)
        self._engine = build_engine(checkpoint, config, self._parts, profiles, make)
        self._forwards.timings.clear()  # of the warm-up
        self._engine.start(after_step=self._mark)

    def _mark(self) -> None:
        # Read at each step, because `serve` replaces it.
        self._watch.mark(self._forwards, self._parts.last)
        self._parts.last = {}

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        num_output: int,
        *,
        gap_s: float = 0.0,
        grammar: Grammar | None = None,
        predictions: Sequence[Sequence[int]] = (),
        **sampling: Any,
    ) -> Served:
        """Serve the prompts, with answers of exactly `num_output` tokens, greedy by default.

        `gap_s`: seconds between two requests; 0 sends all at once. `predictions`: what each answer
        probably contains; none: nothing. With a grammar, an answer may end earlier. Raises
        RuntimeError if another answer fails or ends early.
        """
        watch, parts = _Watch(len(prompts)), self._parts
        self._watch, parts.num_drafted, parts.num_accepted = watch, 0, 0
        requests = [
            (
                replace(
                    self._request(ids, num_output, grammar, sampling),
                    prediction_ids=tuple(predictions[index]) if predictions else (),
                ),
                watch.collector(index),
            )
            for index, ids in enumerate(prompts)
        ]
        begin = time.perf_counter()
        if gap_s:
            for number, one in enumerate(requests):
                time.sleep(max(0.0, begin + number * gap_s - time.perf_counter()))
                self._engine.submit_all([one])
        else:
            self._engine.submit_all(requests)
        for _ in prompts:
            fault = watch.ended.get(timeout=_WAIT_S)
            if fault is not None and (grammar is None or fault != str(FinishReason.STOP)):
                raise RuntimeError(f"an answer ended early: {fault}")
        # The last answer arrives before its step ends.
        while sum(mark.num_tokens for mark in watch.marks) < watch.num_all:
            time.sleep(1e-4)
        answers = tuple(tuple(watch.answers.get(index, ())) for index in range(len(prompts)))
        served = _served(begin, watch.marks, answers)
        return replace(served, num_drafted=parts.num_drafted, num_accepted=parts.num_accepted)

    def _request(
        self,
        prompt: Sequence[int],
        num_output: int,
        grammar: Grammar | None,
        sampling: Mapping[str, Any],
    ) -> Request:
        tier_choice = self._deployment.choose(RopeRequest(), len(prompt), num_output)
        chosen = {"temperature": 0.0, "ignore_eos": grammar is None, **sampling}
        return Request(
            f"bench-{next(self._ids)}",
            tuple(prompt),
            SamplingParams(max_tokens=num_output, **chosen),
            tier_choice,
            grammar=grammar,
        )

    def stop(self) -> None:
        """Stop the engine's thread, and release its memory even if this object is referenced."""
        self._engine.stop()
        del self._engine


def _served(begin: float, marks: Sequence[_Mark], answers: tuple[tuple[int, ...], ...]) -> Served:
    steps = []
    before, first_s = begin, 0.0
    for mark in marks:
        counts = (mark.num_tokens, mark.num_first, mark.num_crossed, mark.num_prompt)
        steps.append(Step(mark.at - before, *counts, mark.device_s, mark.parts))
        if mark.num_first:
            first_s = mark.at - begin
        before = mark.at
    return Served(before - begin, first_s, tuple(steps), answers)


@contextmanager
def measured(
    checkpoint: Checkpoint, deployment: Deployment, config: EngineConfig
) -> Iterator[Measured]:
    """Yield an engine; when the block ends, stop it and free its memory."""
    engine = Measured(checkpoint, deployment, config)
    try:
        yield engine
    finally:
        engine.stop()
        free_memory()


def free_memory() -> None:
    """Collect unreferenced objects, and release the GPU memory that torch caches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
