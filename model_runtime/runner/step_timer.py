"""The duration of each part of a step.

The timer counts for one part at a time. A part inside another one interrupts it, so that all time
of a step counts once. Entering or leaving a part reads the clock and adds one number.

On a GPU a forward call returns when the work is queued, not when it is done. `forward` is then the
time to queue it. The wait for the results is in `sample`, the first part that reads them. A wait
for the device between the parts would give clearer figures but longer steps.
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
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since = 0.0
        self._entered: list[Part] = []  # the last one counts
        self._parts = {part: _PartTimer(self, part) for part in PARTS}

    def part(self, part: Part) -> "_PartTimer":
        """Return a context manager that counts the time of its block for this part."""
        return self._parts[part]

    def take(self) -> Mapping[Part, float]:
        """Return the seconds of each part since the last call. No part may be entered."""
        assert not self._entered, "the times of a part that has not ended"
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

    def _enter(self, part: Part) -> None:
        now = perf_counter()
        if self._entered:
            self._seconds[self._entered[-1]] += now - self._since
        self._entered.append(part)
        self._since = now

    def _leave(self) -> None:
        now = perf_counter()
        self._seconds[self._entered.pop()] += now - self._since
        self._since = now


class _PartTimer:
    """One part's context manager, made once: a step enters parts for each of its tokens."""

    __slots__ = ("_part", "_timer")

    def __init__(self, timer: StepTimer, part: Part) -> None:
        self._timer = timer
        self._part = part

    def __enter__(self) -> None:
        self._timer._enter(self._part)  # noqa: SLF001

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer._leave()  # noqa: SLF001
