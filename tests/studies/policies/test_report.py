"""The files of a crossing comparison, and the windows that it does not measure twice."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ropewalk.server.corpus.held_out import library_documents
from ropewalk.server.settings.load import load_settings
from ropewalk.studies.evaluation.command import evaluate
from ropewalk.studies.harness.eval_run import EvalError, write_files
from ropewalk.studies.harness.intervals import bootstrap
from ropewalk.studies.harness.progress import Progress
from ropewalk.studies.policies import run as crossing_run
from ropewalk.studies.policies.measure import CROSSING_POLICIES, CrossingPolicy, Outcome
from ropewalk.studies.policies.options import CrossingOptions
from ropewalk.studies.policies.plot import plot
from ropewalk.studies.policies.report import (
    CrossingReport,
    differences_of,
    files_of,
    rows_of,
    table,
)
from ropewalk.studies.policies.run import RECORD_FILE, run_crossings

OPTIONS: dict[str, Any] = {
    "methods": ("yarn",),
    "num_crossings": (1,),
    "num_windows": 2,
    "windows_together": 1,
    "scored_tokens": 4,
    "lead_tokens": 16,
    "native_len": None,
    "seed": 0,
    "resumes": True,
}


def outcome(nll: float, *, found: bool, decode_s: float = 1.0) -> Outcome:
    """One window of two scored tokens, whose mean is `nll`."""
    return Outcome((nll - 0.5, nll + 0.5), found, 1, decode_s, 0.01, (0.02,))


def two_policies() -> dict[tuple[str, int, CrossingPolicy], list[Outcome]]:
    """Three windows: stale is 1 worse everywhere and misses one needle."""
    fixed = [outcome(nll, found=True) for nll in (1.0, 2.0, 6.0)]
    stale = [outcome(nll, found=nll != 3.0, decode_s=2.0) for nll in (2.0, 3.0, 7.0)]
    return {("yarn", 1, "fixed"): fixed, ("yarn", 1, "stale"): stale}


def test_the_bootstrap_is_near_the_normal_interval_of_many_values() -> None:
    """The normal interval is 1.96 standard errors to either side."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400).tolist()
    found = bootstrap(values)
    error = np.std(values) / 20
    assert found.value == pytest.approx(np.mean(values))
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.1 * error)


def test_differences_are_taken_window_by_window() -> None:
    """The intervals of the levels overlap widely, but the difference is certain."""
    fixed, stale = rows_of(two_policies())
    assert fixed["perplexity"].value == pytest.approx(math.exp(3.0))
    assert stale["perplexity"].low < fixed["perplexity"].high
    (difference,) = differences_of(two_policies())
    assert (difference["policy"], difference["against"]) == ("stale", "fixed")
    assert (difference["nll"].low, difference["nll"].high) == pytest.approx((1.0, 1.0))
    assert (difference["num_found_only_here"], difference["num_found_only_there"]) == (0, 1)
    assert difference["decode_time"] == 2.0
    assert "+1.0000 [+1.0000, +1.0000]" in table(two_policies())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run on the embedded model."""
    folder = tmp_path_factory.mktemp("crossings")
    report = compared(folder)
    write_files(folder, files_of(report))
    plot(report, folder / "crossings.png")
    return folder


def compared(folder: Path, **changed: Any) -> CrossingReport:
    """A run of two windows, one after the other."""
    options = CrossingOptions(output=folder, **{**OPTIONS, **changed})
    documents = library_documents(held_out=True)
    return run_crossings(load_settings({}), options, documents, Progress())


@pytest.mark.costly(by="finished")
def test_finished_cells_are_not_measured_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line that was cut off and a text of another seed are measured."""
    lines = (finished / RECORD_FILE).read_text().splitlines(keepends=True)
    assert len(lines) == 2 * len(CROSSING_POLICIES)
    (tmp_path / RECORD_FILE).write_text("".join(lines[:-1]) + lines[-1][:40])
    measured: list[str] = []
    original = crossing_run.run_windows

    def watched(*arguments: Any, **named: Any) -> list[Outcome]:
        measured.append(arguments[2])
        return original(*arguments, **named)

    monkeypatch.setattr(crossing_run, "run_windows", watched)
    again = compared(tmp_path).outcomes
    assert measured == ["stale"]
    assert [row["perplexity"] for row in rows_of(again)] == [
        row["perplexity"] for row in rows_of(compared(finished).outcomes)
    ]
    assert len(measured) == 1

    def noted(*arguments: Any, **_: Any) -> list[Outcome]:
        measured.append(arguments[2])
        return [outcome(1.0, found=True)]

    monkeypatch.setattr(crossing_run, "run_windows", noted)
    compared(tmp_path, seed=1, num_windows=1)
    assert measured[1:] == list(CROSSING_POLICIES)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--methods", "yarn,longrope"), "methods must be of yarn, dynamic,"),
        (("--methods", "yarn@0"), "behind @ stands a whole number of tokens from 1, got 'yarn@0'"),
        (("--crossings", "1,7"), "crossings must be from 1 to 6, got 7"),
        (("--crossings", "two"), "must be integers with commas between them, got 'two'"),
        (("--native-len", "512"), "at most what the checkpoint was trained for (256), got 512"),
        (("--windows", "100000"), "--windows: the text has"),
        (("--windows", "0"), "0 is not in the range x>=1"),
        (("--scored-tokens", "500", "--crossings", "1"), "last tier of 512 tokens, got"),
        (("--queries", "4"), "--queries is an option of `ropewalk eval lengths`"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_runs_that_cannot_be_compared_are_refused(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """The command exits with code 2 and names the option, the limit and the value."""
    ended = CliRunner().invoke(
        evaluate, ("--policies", "--output", str(tmp_path / "out"), *arguments)
    )
    assert ended.exit_code == 2
    assert sentence in ended.output


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    """The message states the number of the line."""
    (tmp_path / RECORD_FILE).write_text("{}\n")
    ended = CliRunner().invoke(evaluate, ("--policies", "--output", str(tmp_path)))
    assert ended.exit_code == 2
    assert "line 1 of" in ended.output


def test_a_cache_in_few_bits_is_refused(tmp_path: Path) -> None:
    """Cached keys change here, which the comparison does in the numbers as they were written."""
    options = CrossingOptions(**OPTIONS, output=tmp_path)
    settings = load_settings({"kv_cache_dtype": "int4"})
    with pytest.raises(EvalError, match=r"kv_cache_dtype must be auto .*, got int4"):
        run_crossings(settings, options, [], Progress())
