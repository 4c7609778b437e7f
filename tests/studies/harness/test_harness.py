"""The harness of studies: cells and their record, columns in three forms, and options."""

import csv
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter

from ropewalk.studies.harness.eval_run import EvalError, RunRecord, run_study
from ropewalk.studies.harness.frame import (
    Column,
    aligned,
    csv_of,
    flat,
    json_of,
    make_rows,
    text_of,
)
from ropewalk.studies.harness.intervals import Estimate
from ropewalk.studies.harness.options import COUNT, Integers, Names, Percents, option, with_options
from ropewalk.studies.harness.progress import Progress

COLUMNS = (
    Column("name", heading="\nname"),
    Column("score", lambda row: row["found"], "score\n%", ".1f", is_estimate=True),
    Column("note", lambda row: row["name"] * 2, "\nnote", only_text=True),
)
ROWS = make_rows(
    COLUMNS, [{"name": "a", "found": Estimate(2.0, 1.0, 3.5)}, {"name": "b", "found": None}]
)


@dataclass
class Cell:
    """A cell that counts how often it is measured."""

    label: str
    size: int = 3
    times: list[int] = field(default_factory=list)

    def in_words(self) -> dict[str, Any]:
        """The cell, for readers of the record."""
        return {"label": self.label}


@dataclass
class Heard(Progress):
    """What a run has told."""

    lengths: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def begin(self, length: int) -> None:
        self.lengths.append(length)

    def log(self, line: str) -> None:
        self.lines.append(line)


def test_a_run_measures_what_its_record_lacks_and_keeps_the_order(tmp_path: Path) -> None:
    """A cell that fails is not recorded, and those before it are."""
    cells = {name: Cell(name) for name in "abc"}

    def measure(cell: Cell) -> list[int]:
        cell.times.append(1)
        if cell.label == "c" and len(cell.times) == 1:
            raise EvalError("c fails once")
        return [ord(cell.label)]

    def run(heard: Heard) -> list[list[int]]:
        record = RunRecord(tmp_path / "r.jsonl", TypeAdapter(list[int]), resumes=True)
        return run_study(dict(reversed(cells.items())), measure, record, heard)

    with pytest.raises(EvalError, match="c fails once"):
        run(Heard())
    assert run(Heard()) == [[99], [98], [97]]
    heard = Heard()
    assert run(heard) == [[99], [98], [97]]
    assert [len(cell.times) for cell in cells.values()] == [1, 1, 2]
    assert heard.lengths == [0]
    assert heard.lines == [
        "3 of 3 cells are those of r.jsonl and are not measured again (--no-resume measures them)"
    ]
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [(line["key"], line["label"], line["results"]) for line in lines] == [
        ("c", "c", [99]),
        ("b", "b", [98]),
        ("a", "a", [97]),
    ]


def test_columns_are_text_json_and_csv() -> None:
    """A missing estimate is a dash, null, and three empty fields."""
    assert text_of(COLUMNS, ROWS) == [
        "               score",
        "name               %  note",
        "   a  2.0 [1.0, 3.5]    aa",
        "   b               -    bb",
    ]
    assert json_of(COLUMNS, ROWS) == [
        {"name": "a", "score": {"value": 2.0, "low": 1.0, "high": 3.5}},
        {"name": "b", "score": None},
    ]
    read = list(csv.DictReader(io.StringIO(csv_of(flat(COLUMNS, ROWS)))))
    assert read == [
        {"name": "a", "score": "2.0", "score_low": "1.0", "score_high": "3.5"},
        {"name": "b", "score": "", "score_low": "", "score_high": ""},
    ]


def test_cells_are_aligned_within_least_widths() -> None:
    """The first columns may begin below each other."""
    rows = [["ab", "c", "d"], ["e", "fgh", ""]]
    assert aligned(rows, [4]) == ["  ab    c  d", "   e  fgh"]
    assert aligned(rows, num_left=1) == ["ab    c  d", "e   fgh"]


@dataclass(frozen=True, kw_only=True)
class Base:
    """Options that several commands have."""

    seed: int = option("Seed.", int, 0)


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Options of one command."""

    num_cells: int = option("Cells.", COUNT, 4)
    lens: tuple[int, ...] = option("Lengths.", Integers(most=9), (2, 1))
    shares: tuple[float, ...] = option("Shares.", Percents(), ())
    names: tuple[int, ...] = option("Names.", Names({"one": 1, "two": 2}), ())
    left_out: int = option("Of another command.", COUNT, 1)


@click.command()
@with_options(Options, without=("left_out",), seed=7)
def command(**options: Any) -> None:
    """Print the options."""
    click.echo(Options(**options))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "Options(seed=7, num_cells=4, lens=(2, 1), shares=(), names=(), left_out=1)"),
        (
            "--lens 3,1,3 --shares 50,0 --names two,one --cells 2",
            "lens=(1, 3), shares=(0.0, 0.5), n",
        ),
        ("--names two,one", "names=(1, 2)"),
        ("--names three", "--names must be of one, two; got 'three'"),
        ("--lens 10", "--lens must be from 1 to 9, got 10"),
        ("--shares nan", "--shares must be from 0 to 100 percent, got nan"),
        ("--left-out 3", "No such option"),
    ],
)
def test_a_dataclass_is_the_options_of_a_command(arguments: str, said: str) -> None:
    """Several values are listed once, in order; the error names the option and the limit."""
    assert said in CliRunner().invoke(command, arguments.split()).output


def test_options_of_a_base_come_last_in_the_help() -> None:
    """A value is named by its type."""
    text = CliRunner().invoke(command, ["--help"]).output
    assert "--cells N" in text
    assert "--lens N,N,..." in text
    assert text.index("--names NAME,...") < text.index("--seed N")
