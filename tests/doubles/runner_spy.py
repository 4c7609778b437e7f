"""Steps of a real runner, shown to a listener beside the model."""

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile

Note = Callable[[Sequence[Span], Tensor], None]  # takes a step's spans and its logits [R, V]


class RunnerSpy:
    """A runner that passes steps on to an engine's own, and calls `note` after each."""

    def __init__(self, engine: Engine, note: Note) -> None:
        self._note = note
        self._runner = engine._core._runner
        engine._core._runner = engine._core._launcher._runner = self

    is_asynchronous = False  # all steps are prepared, so all are noted
    is_captured = False
    most_draft_rows = 0

    def table_id(self, profile: Profile) -> int:
        """Return the rotation table of the real runner."""
        return self._runner.table_id(profile)

    def check_device(self) -> None:
        """Check the real runner's device."""
        self._runner.check_device()

    def prepare(self, spans: Sequence[Span]) -> Callable[[], Tensor]:
        """Prepare the step on the real runner; its forward notes it."""
        return _noted(self._runner.prepare(spans), spans, self._note)


def spy_on_every_runner(monkeypatch: pytest.MonkeyPatch, note: Note) -> None:
    """Note the steps of all model runners, also of those that only the tested code can reach."""
    plain_prepare = ModelRunner.prepare

    def prepare(self: ModelRunner, spans: Sequence[Span]) -> Callable[[], Tensor]:
        return _noted(plain_prepare(self, spans), spans, note)

    monkeypatch.setattr(ModelRunner, "prepare", prepare)
    monkeypatch.setattr(ModelRunner, "is_asynchronous", False)  # all steps are prepared


def _noted(
    forward: Callable[[], Tensor], spans: Sequence[Span], note: Note
) -> Callable[[], Tensor]:
    def noting() -> Tensor:
        logits_RV = forward()
        note(spans, logits_RV)
        return logits_RV

    return noting
