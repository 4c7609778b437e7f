"""The record: a line of JSON for each finished scenario of a server and a round."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ropewalk.studies.harness.jsonl_file import LineFile


class RecordError(Exception):
    """The file does not fit this run; the message is a whole sentence."""


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario on one server in one round. If it failed, it has an error and no values."""

    scenario: str
    sizes: dict[str, int]  # sizes of the scenario
    server: str  # its name on the command line
    model: str
    round: int  # from 0
    started_at: str  # UTC
    seed: int  # seed of the prompts
    load_1min: float  # load of the machine at the start
    values: dict[str, float]  # metric's name -> value
    num_tokens: int
    num_events: int
    remark: str | None = None
    error: str | None = None


class Record:
    """Rows in an append-only file, with those of a run that was stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = LineFile(path)
        self.rows: list[Row] = []
        if path.exists():
            self._read()

    def add(self, row: Row) -> None:
        """Append a row, on disk at once."""
        self._lines.add(asdict(row))
        self.rows.append(row)

    def finished(self, scenario: str, sizes: dict[str, int], server: str) -> dict[int, Row]:
        """Return the rows without an error, by round."""
        return {
            row.round: row
            for row in self.rows
            if (row.scenario, row.sizes, row.server) == (scenario, sizes, server) and not row.error
        }

    def check_model(self, server: str, model: str) -> None:
        """Raise RecordError if this server's rows are of another model."""
        for row in self.rows:
            if row.server == server and row.model != model:
                raise RecordError(
                    f"{self._path} has rounds of {server} with the model {row.model!r}, and it "
                    f"serves {model!r} now: give another file"
                )

    def _read(self) -> None:
        for number, line in self._lines.lines():
            try:
                self.rows.append(Row(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise RecordError(f"{self._path}: line {number} is no row of a run") from error
