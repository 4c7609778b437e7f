"""The engine under measurement, with the time of every step."""

import gc
import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from model_runtime.config import EngineConfig
from model_runtime.deployment import Deployment, RopeRequest
from model_runtime.engine.build_engine import build_engine
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.request import FinishReason, OnOutput, Output, Request, SamplingParams
from model_runtime.runner.model_runner import ModelRunner

_WAIT_S = 300  # seconds to wait for the end of the next answer


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, timed from the end of the step before it."""

    seconds: float
    num_tokens: int  # answer tokens
    num_first: int  # first tokens of answers among them
    num_crossed: int  # requests that changed their table in this step


@dataclass(frozen=True, slots=True)
class Served:
    """The times of requests that were sent together."""

    seconds: float  # from sending to the last token
    first_token_s: float  # from sending to the last first token
    steps: tuple[Step, ...]

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

    def crossing_s(self) -> float:
        """Return the time of the one step that read the cache under a new table."""
        (step,) = (step for step in self.steps if step.num_crossed)
        return step.seconds


@dataclass(slots=True)
class _Watch:
    """Counts that the engine's thread writes while it serves; they are read after the last step."""

    num_left: int
    ended: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    marks: list[tuple[float, int, int, int]] = field(default_factory=list)
    rescales: dict[int, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
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
                self.num_first += index not in self.started
                self.started.add(index)
            self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                is_whole = output.finish_reason is FinishReason.LENGTH
                self.ended.put(None if is_whole else output.error or str(output.finish_reason))

        return collect

    def mark(self) -> None:
        """Record the end of a step, and reset the counts."""
        mark = (time.perf_counter(), self.num_tokens, self.num_first, self.num_crossed)
        self.marks.append(mark)
        self.num_tokens = self.num_first = self.num_crossed = 0


class Measured:
    """One engine over a checkpoint. `make` is its model runner, which decides the kind of cache."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        deployment: Deployment,
        config: EngineConfig,
        make: type[ModelRunner],
    ) -> None:
        self._deployment = deployment
        self._ids = itertools.count()
        self._watch = _Watch(0)
        profiles = [tier.profile for tier in deployment.own_tiers]
        self._engine = build_engine(checkpoint, config, None, profiles, make)
        self._engine.start(after_step=self._mark)

    def _mark(self) -> None:
        self._watch.mark()  # read at each step, because `serve` replaces it

    def serve(self, prompts: Sequence[Sequence[int]], num_output: int) -> Served:
        """Serve the prompts together, with greedy answers of exactly `num_output` tokens.

        Raises RuntimeError if an answer fails or ends early.
        """
        watch = self._watch = _Watch(len(prompts))
        requests = [
            (self._request(ids, num_output), watch.collector(index))
            for index, ids in enumerate(prompts)
        ]
        begin = time.perf_counter()
        self._engine.submit_all(requests)
        for _ in prompts:
            fault = watch.ended.get(timeout=_WAIT_S)
            if fault is not None:
                raise RuntimeError(f"an answer ended early: {fault}")
        while sum(tokens for _, tokens, _, _ in watch.marks) < len(prompts) * num_output:
            time.sleep(1e-4)  # the last answer arrives before its step ends
        return _served(begin, watch.marks)

    def _request(self, prompt: Sequence[int], num_output: int) -> Request:
        placement = self._deployment.place(RopeRequest(), len(prompt), num_output)
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        return Request(f"bench-{next(self._ids)}", tuple(prompt), sampling, placement)

    def stop(self) -> None:
        """Stop the engine's thread, and release its memory even if this object is referenced."""
        self._engine.stop()
        del self._engine


def _served(begin: float, marks: Sequence[tuple[float, int, int, int]]) -> Served:
    steps = []
    before, first_s = begin, 0.0
    for end, num_tokens, num_first, num_crossed in marks:
        steps.append(Step(end - before, num_tokens, num_first, num_crossed))
        if num_first:
            first_s = end - begin
        before = end
    return Served(before - begin, first_s, tuple(steps))


@contextmanager
def measured(
    checkpoint: Checkpoint,
    deployment: Deployment,
    config: EngineConfig,
    make: type[ModelRunner] = ModelRunner,
) -> Iterator[Measured]:
    """Yield an engine; when the block ends, stop it and free its memory."""
    engine = Measured(checkpoint, deployment, config, make)
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
