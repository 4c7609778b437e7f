"""A model runner whose forwards are timed on their device, without a wait for it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.runner.model_runner import ModelRunner


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
