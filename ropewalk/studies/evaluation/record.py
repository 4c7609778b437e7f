"""Write the files of a run: the record of finished cells, with which it is resumed, and results."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ropewalk.studies.evaluation.cells import Score
from ropewalk.studies.evaluation.plan import EvalError
from ropewalk.studies.harness.jsonl_file import LineFile

_SCORES = TypeAdapter(list[Score])


class RunRecord:
    """Scores of finished cells by key, in an append-only file, so that a run can be resumed."""

    def __init__(self, path: Path, *, resumes: bool) -> None:
        """Read the existing file, or begin a new one. Raises EvalError."""
        self.path = path
        self._lines = LineFile(path)
        self._found: dict[str, list[Score]] = {}
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not resumes:
                path.unlink(missing_ok=True)
            elif path.exists():
                self._read()

    def get(self, key: str) -> list[Score] | None:
        """Return the scores measured under this key in any run, or None."""
        return self._found.get(key)

    def add(self, key: str, cell: Mapping[str, Any], scores: list[Score]) -> None:
        """Save a finished cell to disk at once. `cell` describes it for readers of the file."""
        line = {"key": key, **cell, "results": _SCORES.dump_python(scores)}
        with writing(self.path.parent):
            self._lines.add(line)
        self._found[key] = scores

    def _read(self) -> None:
        for number, line in self._lines.lines():
            try:
                found = json.loads(line)
                self._found[found["key"]] = _SCORES.validate_python(found["results"])
            except (ValueError, TypeError, KeyError) as error:
                raise EvalError(
                    f"--output: line {number} of {self.path} is not a finished cell; "
                    "--no-resume begins it anew"
                ) from error


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an OSError of a write to the folder into an EvalError."""
    try:
        yield
    except OSError as error:
        raise EvalError(
            f"--output: cannot write {error.filename or folder}: {error.strerror}"
        ) from error


def write_files(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write files by name: a text as it is, anything else as JSON. Raises EvalError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
