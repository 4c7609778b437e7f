"""`ropewalk inspect` shows the distance at which a position method sees a key."""

import json
from pathlib import Path
from typing import Any

import pytest

from ropewalk.rope import DualChunk, PositionMethod, ReRope, SelfExtend, Shifted, Sinks
from tests.oracles import position_oracle as oracle
from tests.servers.processes import run_here


def inspected(*flags: str, **positions: Any) -> Any:
    """Lines that the command prints for the embedded model under a method."""
    block = {"rope_type": "default", "positions": positions}
    flags = ("--rope-scaling", json.dumps(block), "--max-model-len", "1024", *flags)
    return run_here("inspect", *flags)


@pytest.mark.parametrize(
    ("method", "distance"),
    [
        (ReRope(20), oracle.rerope(20)),
        (SelfExtend(12, 4), oracle.self_extend(12, 4)),
        (DualChunk(32, 8), oracle.dual_chunk(24, 32)),
        (Shifted(21, 5), oracle.string(21, 5)),
        (Sinks(3, 17), oracle.sinks(3, 17)),
    ],
)
@pytest.mark.parametrize("position", [0, 11, 12, 19, 20, 23, 24, 47, 48, 71, 72, 90])
def test_seen_distances_are_the_published_ones(
    method: PositionMethod, distance: oracle.Distance, position: int
) -> None:
    """Every key of a query at every kind of position."""
    distances = range(position + 1)
    expected = [distance(position, position - each) for each in distances]
    assert method.seen_distances(position, distances) == expected


def test_the_report_has_a_row_for_each_distance() -> None:
    """Beyond the window every key is 64 tokens away, and the bound stays what it is there."""
    text = inspected(method="rerope", window=64).stdout
    assert "distance at which the last query of a tier sees a key" in text
    rows = [line.split() for line in text.partition("sees a key")[2].splitlines()]
    seen = {row[0]: row[1] for row in rows if len(row) == 2 and row[0].isdigit()}
    assert (seen["32"], seen["64"], seen["128"], seen["1023"]) == ("32", "64", "64", "64")
    found = json.loads(inspected("--json", method="rerope", window=64).stdout)
    seen_at = found["deployments"][0]["decay"]["seen_at"]
    assert [each[-1] for each in seen_at] == [1023, 64]


def test_a_key_that_is_not_read_has_no_bound(tmp_path: Path) -> None:
    """Neither a number in the report nor a point in the plot."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "a.svg"
    ended = inspected("--plot", str(plot), method="sinks", sinks=4, window=60)
    assert ended.returncode == 0
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert ["512", "-"] in [[row[0], row[-1]] for row in rows if row]
    assert plot.stat().st_size > 1000


def test_scores_of_heads_are_those_at_the_seen_distances(tmp_path: Path) -> None:
    """Behind the window of 64 every score is the trained table's at 64; sinks leave keys out."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "a.svg"
    flags = ("--heads", "0", "--sample-tokens", "100", "--json")
    placed = _tier_scores(*flags, "--plot", str(plot), method="rerope", window=64)
    trained = _tier_scores(*flags, "--max-model-len", "256", method="native")
    column = placed["distances"].index(64)
    for row, untouched in zip(placed["tiers"][-1], trained["unscaled"], strict=True):
        for kind in ("expected", "spread"):
            assert row[kind][:column] == untouched[kind][:column]
            assert row[kind][column:] == [untouched[kind][column]] * len(row[kind][column:])
    assert plot.stat().st_size > 1000
    left_out = _tier_scores(*flags, method="sinks", sinks=4, window=60)["tiers"][-1][0]
    # The key at distance 1,023 is the first sink, which is seen right before the window.
    assert [each is None for each in left_out["expected"][-4:]] == [True, True, True, False]


def _tier_scores(*flags: str, **positions: Any) -> Any:
    """Return the scores of the only deployment."""
    return json.loads(inspected(*flags, **positions).stdout)["deployments"][0]["scores"]


def test_the_factor_of_string_is_in_the_bound() -> None:
    """It multiplies cos and sin, so bounds grow by its square."""
    block = {"method": "string", "shift": 80, "window": 64}
    plain, factored = (
        json.loads(inspected("--max-model-len", "256", "--json", **block, **more).stdout)
        for more in ({}, {"attention_factor": 2.0})
    )
    before, after = (each["deployments"][0]["decay"]["tiers"][0] for each in (plain, factored))
    assert after == pytest.approx([4 * each for each in before])
