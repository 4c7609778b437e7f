"""Step costs from a formula instead of the clock: drafts that pay do so on a busy machine, too.

`python -m tests.fixed_costs serve ...` is `ropewalk serve` with them.
"""

import pytest

from ropewalk.model_runtime.engine import speculator
from ropewalk.model_runtime.scheduling.step_cost import StepCost

MODULE = "tests.fixed_costs"
STEP_S = 10e-3
ROW_S = 0.3e-3  # of each row; about the ratio of a small model on a quiet processor


class FixedCost(StepCost):
    """A line through steps whose seconds follow from their rows alone."""

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step of so many rows; how long it took is ignored."""
        super().note(num_rows, STEP_S + ROW_S * num_rows)


def fix_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every engine of a test fixed costs."""
    monkeypatch.setattr(speculator, "StepCost", FixedCost)


if __name__ == "__main__":
    from ropewalk.__main__ import main

    speculator.StepCost = FixedCost  # type: ignore[misc]
    main()
