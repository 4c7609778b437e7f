"""A run can stop at any time, and its result is that of an uninterrupted run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training import loop
from training.loop import Training, open_training
from training.run_folder import RunFolder, RunFolderError
from training.shape import Schedule, Shape
from training.text import Corpus

SCHEDULE = Schedule(steps=4, polish_steps=2, windows_per_step=4, warmup_steps=2, planted=False)


@pytest.fixture(autouse=True)
def _few_windows_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_HELD_OUT_WINDOWS", 8)


def _training(corpus: Corpus, shape: Shape, schedule: Schedule, folder: Path) -> Training:
    run = RunFolder(folder, shape, schedule)
    return open_training(corpus, shape, schedule, run, compiled=False)


@pytest.mark.long
def test_a_resumed_run_ends_as_one_that_never_stopped(
    corpus: Corpus, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are equal to the bit, after a stop right behind a checkpoint or a step later."""
    monkeypatch.setattr(loop, "_MEASURE_EVERY", 2)
    whole = _training(corpus, shape, SCHEDULE, tmp_path / "whole")
    assert [each.step for each in whole.steps() if each] == [2, 4, 6]
    for stop_after in (2, 3):
        folder = tmp_path / f"stopped{stop_after}"
        begun = _training(corpus, shape, SCHEDULE, folder)
        for _, _ in zip(range(stop_after), begun.steps(), strict=False):
            pass
        resumed = _training(corpus, shape, SCHEDULE, folder)
        assert resumed.progress.step == 2
        assert [each.step for each in resumed.steps() if each] == [4, 6]
        for name, tensor in whole.network.state_dict().items():
            assert torch.equal(tensor, resumed.network.state_dict()[name]), name
        ends = [training.progress.history[-1] for training in (whole, resumed)]
        assert ends[0].held_out == ends[1].held_out
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 1


def test_training_learns(corpus: Corpus, shape: Shape, tmp_path: Path) -> None:
    """Thirty steps reduce the held-out loss by more than half a nat."""
    schedule = replace(SCHEDULE, steps=30, polish_steps=0)
    training = _training(corpus, shape, schedule, tmp_path)
    before = training._held_out_loss(loop.Kind.TEXT)
    measured = [each for each in training.steps() if each][-1]
    assert measured.held_out < before - 0.5
    assert measured.num_tokens == 30 * 4 * 256


def test_a_folder_of_another_run_is_refused(
    corpus: Corpus, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another run would mix the two runs."""
    monkeypatch.setattr(loop, "_MEASURE_EVERY", 1)
    next(_training(corpus, shape, SCHEDULE, tmp_path).steps())
    other = replace(shape, qkv_bias=not shape.qkv_bias)
    with pytest.raises(RunFolderError, match="another shape"):
        _training(corpus, other, SCHEDULE, tmp_path)
    with pytest.raises(RunFolderError, match="another schedule"):
        _training(corpus, shape, replace(SCHEDULE, seed=1), tmp_path)


def test_rates_rise_stay_and_fall() -> None:
    """The rates follow the schedule."""
    schedule = Schedule(steps=1000, polish_steps=100)
    rates = [schedule.rate(step) for step in range(schedule.all_steps)]
    assert rates[0] == pytest.approx(1 / 40)
    assert set(rates[39:500]) == {1.0}
    assert rates[750] == pytest.approx(0.5)
    assert rates[999] == pytest.approx(0.02)
    assert rates[1000] == pytest.approx(0.25)
    assert rates[1050] == pytest.approx(0.125)
    assert rates[-1] == pytest.approx(0.02)
