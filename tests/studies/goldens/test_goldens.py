"""Every output of eval, inspect and bench is that of the kept files."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.studies.goldens.runs import GOLDENS, RUNS, produce, refusals

# Numbers of `inspect` are computed here, and a processor may round them in another way. Those of
# the others come from kept measurements.
_ROUNDING = 1e-3
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")


@pytest.fixture(autouse=True)
def _logs_elsewhere() -> Iterator[None]:
    """Undo the command's log settings, which point at the standard error of its run."""
    yield
    structlog.reset_defaults()


def assert_alike(found: str, kept: str, rounding: float) -> None:
    """Compare texts; numbers may differ by a rounding, or by one in their last digit."""
    if found == kept:
        return
    assert _NUMBER.sub("#", found) == _NUMBER.sub("#", kept)
    for one, other in zip(_NUMBER.findall(found), _NUMBER.findall(kept), strict=True):
        digits = len(other.partition("e")[0].partition(".")[2])
        last = 1.01 * 10.0**-digits if digits else 0.0
        near = rounding > 0 and math.isclose(
            float(one), float(other), rel_tol=rounding, abs_tol=max(last, 1e-4)
        )
        assert near or math.isclose(float(one), float(other), rel_tol=1e-12), (one, other)


@pytest.mark.parametrize("name", RUNS)
def test_outputs_are_those_that_are_kept(
    name: str, embedded: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of an eval was written by an earlier version and measures nothing again."""
    monkeypatch.setenv("COLUMNS", "80")
    found = produce(name, embedded, tmp_path)
    kept = {path.name: path.read_text() for path in (GOLDENS / name).iterdir()}
    assert set(found) == set(kept)
    rounding = _ROUNDING if name.startswith("inspect") else 0.0
    for each, text in kept.items():
        assert_alike(found[each], text, rounding)


def test_refusals_are_those_that_are_kept(
    embedded: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that a command cannot use are named with their limits and values."""
    monkeypatch.setenv("COLUMNS", "80")
    assert refusals(embedded, tmp_path) == (GOLDENS / "refusals.txt").read_text()
