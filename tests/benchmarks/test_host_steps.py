"""The host's time in a step is measured by part, without a model."""

import pytest
from click.testing import CliRunner

from benchmarks.host_steps import main
from ropewalk.model_runtime.runner.step_timer import PARTS


def test_a_row_has_the_step_and_its_parts() -> None:
    """The parts do not add up to more than the step."""
    done = CliRunner().invoke(main, ["--sequences", "3", "--rounds", "1"], catch_exceptions=False)
    heads, _, row = [line.strip("| ").split(" | ") for line in done.output.splitlines()]
    assert heads == ["sequences", "revision", "step, ms", *(f"{part}, ms" for part in PARTS)]
    assert row[:2] == ["3", "this"]
    step, *parts = map(float, row[2:])
    assert 0 < sum(parts) < 1.1 * step
    assert min(parts) > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sequences", "1,x"], "must be numbers with commas"),
        (["--sequences", "0"], "must be at least 1"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], sentence: str) -> None:
    """The process ends with 2 before anything is measured."""
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert sentence in done.output


def test_an_unknown_revision_is_named() -> None:
    """Git's own message would not name the option."""
    done = CliRunner().invoke(main, ["--against", "no-such-revision"])
    assert done.exit_code != 0
    assert "--against: git knows no revision 'no-such-revision'" in done.output
