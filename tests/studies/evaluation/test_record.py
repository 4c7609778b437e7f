"""The record of `ropewalk eval`, in which a finished cell is kept."""

from pathlib import Path

import pytest

from ropewalk.studies.evaluation.cells import QueryScore, Score, WindowScore
from ropewalk.studies.evaluation.plan import EvalError
from ropewalk.studies.evaluation.record import RunRecord

SCORES: list[Score] = [
    WindowScore("a", 2.5, 4, 9),
    QueryScore("print", 0.5, 7, is_right=True, answer="12345"),
]


def test_a_record_has_what_an_earlier_run_added(tmp_path: Path) -> None:
    """A line that was cut off while it was written is no part of it."""
    path = tmp_path / "new" / "results.jsonl"
    RunRecord(path, resumes=True).add("a", {"kind": "x"}, SCORES)
    with path.open("a") as file:
        file.write('{"key": "b", "resul')
    record = RunRecord(path, resumes=True)
    assert record.get("a") == SCORES
    assert record.get("b") is None
    record.add("c", {"kind": "y"}, [])
    assert RunRecord(path, resumes=True).get("c") == []
    assert RunRecord(path, resumes=False).get("a") is None


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    """The message states the number of the line."""
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(EvalError, match=r"line 1 of .* is not a finished cell; --no-resume"):
        RunRecord(tmp_path / "results.jsonl", resumes=True)
