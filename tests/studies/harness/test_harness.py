"""The harness of studies: options from a dataclass, and text in columns."""

from dataclasses import dataclass
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ropewalk.studies.harness.options import COUNT, Listed, Names, option, with_options
from ropewalk.studies.harness.text_table import aligned


def test_cells_are_aligned_within_least_widths() -> None:
    """The first columns may begin below each other."""
    rows = [["ab", "c", "d"], ["e", "fgh", ""]]
    assert aligned(rows, [4]) == ["  ab    c  d", "   e  fgh"]
    assert aligned(rows, num_left=1) == ["ab    c  d", "e   fgh"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one command."""

    num_cells: int = option("Cells.", COUNT, 4)
    lens: tuple[int, ...] = option("Lengths.", Listed(COUNT), (2, 1))
    shares: tuple[float, ...] = option("Shares.", Listed(click.FloatRange(0, 100)), ())
    names: tuple[int, ...] = option("Names.", Names({"one": 1, "two": 2, "deux": 2}), ())


@click.command()
@with_options(Options)
def command(**options: Any) -> None:
    """Print the options."""
    click.echo(Options(**options))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "Options(num_cells=4, lens=(2, 1), shares=(), names=())"),
        (
            "--lens 3,1,3 --shares 50,0 --names two,one --cells 2",
            "Options(num_cells=2, lens=(1, 3), shares=(0.0, 50.0), names=(1, 2))",
        ),
        ("--names deux,two", "names=(2,)"),
    ],
)
def test_a_dataclass_is_the_options_of_a_command(arguments: str, said: str) -> None:
    """Several values are listed once, in order."""
    assert said in CliRunner().invoke(command, arguments.split()).output
