"""Where a step's time goes.

The clock stands on one part at a time and is switched to the next, so that every moment of a step
counts once. A switch reads the clock and adds one number: 0.2 microseconds.

On a GPU a forward call returns when the work is queued, not when it is done. `forward` is then the
time to queue it, and the wait for the results is in `sample`, which is the first to read them.
Waiting for the device in between would make the figures prettier and the steps longer.
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Literal, get_args

Part = Literal["schedule", "build", "forward", "sample", "detokenize", "deliver"]
# schedule: which tokens are computed, and noting that they are; build: the batch's tensors;
# forward: the model; sample: logits to tokens and logprobs, and what a grammar allows;
# detokenize: tokens to text, stop strings, a grammar's advance; deliver: callbacks and metrics.
PARTS: tuple[Part, ...] = get_args(Part)


class StepTimer:
    """Seconds of each part. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._part: Part | None = None
        self._since = 0.0

    def switch(self, part: Part | None) -> Part | None:
        """From now on time is this part's, or nobody's. Returns whose it was until now."""
        now, before = perf_counter(), self._part
        if before is not None:
            self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def take(self) -> Mapping[Part, float]:
        """Stand still, and return the seconds of each part since the last call."""
        self.switch(None)
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds
