"""results.jsonl: a line for each finished cell, so that a run can be resumed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server.evaluation.cells import PERPLEXITY, Cell, QueryScore, Score, WindowScore
from server.evaluation.plan import EvalError
from server.jsonl_file import LineFile

FILE = "results.jsonl"


class Record:
    """Scores by the key of a cell, in an append-only file."""

    def __init__(self, folder: Path, *, resumes: bool) -> None:
        self._path = folder / FILE
        self._lines = LineFile(self._path)
        self._scores: dict[str, list[Score]] = {}
        if not resumes:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._read()

    def get(self, key: str) -> list[Score] | None:
        """Return the scores measured under this key in any run, or None."""
        return self._scores.get(key)

    def add(self, key: str, cell: Cell, scores: list[Score], seconds: float) -> None:
        """Save a finished cell to disk at once."""
        line = {
            "key": key,
            "kind": cell.kind,
            "context_len": cell.context_len,
            "profile": repr(cell.placement.tier.profile),  # for readers; the key has it, too
            "seconds": round(seconds, 3),
            "scores": [asdict(each) for each in scores],
        }
        self._lines.add(line)
        self._scores[key] = scores

    def _read(self) -> None:
        for number, line in self._lines.lines():
            try:
                found = json.loads(line)
                self._scores[found["key"]] = [
                    _score(found["kind"], each) for each in found["scores"]
                ]
            except (ValueError, TypeError, KeyError) as error:
                raise EvalError(
                    f"--output: line {number} of {self._path} is none of a finished cell; "
                    "--no-resume begins it anew"
                ) from error


def _score(kind: str, fields: dict[str, Any]) -> Score:
    return WindowScore(**fields) if kind == PERPLEXITY else QueryScore(**fields)
