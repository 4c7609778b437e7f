"""The duration of each part of a step.

The timer counts for one part at a time and is switched to the next, so that all time of a step
counts once. A switch reads the clock and adds one number, which takes 0.2 microseconds.

On a GPU a forward call returns when the work is queued, not when it is done. `forward` is then the
time to queue it. The wait for the results is in `sample`, the first part that reads them. A wait
for the device between the parts would give clearer figures but longer steps.
"""

from collections.abc import Mapping
from time import perf_counter
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
        self._part: Part | None = None
        self._since = 0.0

    def switch(self, part: Part | None) -> Part | None:
        """Count time for this part from now on, or for none; return the previous part."""
        now, before = perf_counter(), self._part
        if before is not None:
            self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def take(self) -> Mapping[Part, float]:
        """Stop the timer and return the seconds of each part since the last call."""
        self.switch(None)
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds
