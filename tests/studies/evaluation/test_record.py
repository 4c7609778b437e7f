"""The record of `ropewalk eval`, in which a finished cell is kept."""

from pathlib import Path

import pytest

from ropewalk.studies.evaluation.plan import EvalError
from ropewalk.studies.evaluation.record import RunRecord


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    """The message states the number of the line."""
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(EvalError, match=r"line 1 of .* is not a finished cell; --no-resume"):
        RunRecord(tmp_path / "results.jsonl", resumes=True)
