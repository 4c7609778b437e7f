"""The duration of each part of a step.

The timer counts for one part at a time. A part inside another one interrupts it, so that all time
of a step counts once. Entering or leaving a part reads the clock and adds one number.

On a GPU a forward call returns when the work is queued, not when it is done. `forward` is then the
time to queue it. The wait for the results is in `sample`, the first part that reads them. A wait
for the device between the parts would give clearer figures but longer steps.

If a step is launched ahead, then `build` and `forward` are of the next step. `sample` is then the
wait for the current one.
"""

from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Literal, get_args

Part = Literal["schedule", "build", "forward", "sample", "detokenize", "deliver"]
# schedule: choose the tokens to compute, and record them as computed; build: the batch's tensors;
# forward: the model; sample: logits to tokens and logprobs, and a grammar's allowed tokens;
# detokenize: tokens to text, stop strings, a grammar's advance; deliver: callbacks and metrics.
PARTS: tuple[Part, ...] = get_args(Part)


class StepTimer:
    """The seconds of each part. Only the engine's thread may use it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.since = 0.0  # when the innermost part began, or went on
        self.entered: list[Part] = []  # the last one counts
        self._timers = {part: _PartTimer(self, part) for part in PARTS}

    def part(self, part: Part) -> "_PartTimer":
        """Return a context manager that counts the time of its block for this part."""
        return self._timers[part]

    def take(self) -> Mapping[Part, float]:
        """Return the seconds of each part since the last call. No part may be entered."""
        assert not self.entered, "the times of a part that has not ended"
        seconds, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


class _PartTimer:
    """One part's context manager, made once, because every step enters every part."""

    __slots__ = ("_part", "_timer")

    def __init__(self, timer: StepTimer, part: Part) -> None:
        self._timer = timer
        self._part = part

    def __enter__(self) -> None:
        now, timer = perf_counter(), self._timer
        if timer.entered:
            timer.seconds[timer.entered[-1]] += now - timer.since
        timer.entered.append(self._part)
        timer.since = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now, timer = perf_counter(), self._timer
        timer.seconds[timer.entered.pop()] += now - timer.since
        timer.since = now
