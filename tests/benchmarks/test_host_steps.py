"""The host's time in a step is measured by part, without a model."""

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
