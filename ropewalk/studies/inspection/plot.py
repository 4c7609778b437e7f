"""Plots of attention against distance: the bound, and the expected scores of the heads."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropewalk.studies.harness.plotting import COLOURS, new_figure, tidy
from ropewalk.studies.inspection.inspected import InspectedDeployment
from ropewalk.studies.inspection.scores import HeadScores, expected_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 500  # of a curve, evenly spaced on the logarithmic axis
_TICKS = 7


def plot(drawn: Sequence[InspectedDeployment], title: str, path: Path) -> None:
    """Draw a row per deployment: the bound, and any scores without and with scaling.

    If a deployment has a position method, a column has the distances at which keys are seen.

    Raises OSError if the file cannot be written.
    """
    has_methods = any(each.tables.methods for each in drawn)
    num_columns = 1 + has_methods + (2 if any(each.scores for each in drawn) else 0)
    with new_figure(path, 2.5 + 5.5 * num_columns, 1 + 4 * len(drawn), title) as figure:
        grid = figure.subplots(len(drawn), num_columns, squeeze=False)
        for row, each in zip(grid, drawn, strict=True):
            _draw_bounds(row[0], each)
            if has_methods:
                _draw_seen(row[1], each)
            if each.scores is not None:
                longest = list(each.scores.tiers)[-1]
                before, after = row[-2:]
                after.sharey(before)
                _draw_heads(before, each, "unscaled", each.scores.unscaled)
                _draw_heads(after, each, longest, each.scores.tiers[longest])


def _curve_distances(drawn: InspectedDeployment) -> list[int]:
    """Return distances from 1 to the last, dense enough for the shape of the curves."""
    last = drawn.distances[-1]
    powers = torch.linspace(0, math.log2(last), _POINTS)
    return sorted({min(last, round(each)) for each in (2**powers).tolist()})


def _draw_bounds(axes: "Axes", drawn: InspectedDeployment) -> None:
    distances = _curve_distances(drawn)
    tables = drawn.tables.named()
    for number, name in enumerate(tables):
        bounds = _gaps(drawn.tables.bounds(name, distances))
        style = _style(name, number / (len(tables) - 1))
        axes.plot(distances, bounds, linewidth=1, label=name, **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("upper bound, relative")
    axes.legend(frameon=False, fontsize="small")
    _finish(axes, drawn, f"{drawn.deployment.name}: upper bound")


def _draw_seen(axes: "Axes", drawn: InspectedDeployment) -> None:
    """Draw the distance at which the last query of each tier sees a key."""
    distances = _curve_distances(drawn)
    names = ["unscaled", *drawn.tables.methods]
    for number, name in enumerate(names):
        seen = _gaps(drawn.tables.seen(name, distances))
        style = _style(name, number / max(1, len(names) - 1))
        label = "no method" if name == "unscaled" else name
        axes.plot(distances, seen, linewidth=1, label=label, **style)
    axes.set_yscale("symlog", base=2)
    axes.set_ylim(bottom=0)
    axes.axhline(drawn.deployment.native_len, color="0.4", linestyle=":", linewidth=1)
    axes.set_ylabel("distance at which a key is seen")
    axes.legend(frameon=False, fontsize="small")
    _finish(axes, drawn, f"{drawn.deployment.name}: last query of a tier")


def _style(name: str, share: float) -> dict[str, Any]:
    """Return the style of a table's curve; `share` is 0 for the first tier and 1 for the last."""
    if name == "unscaled":  # on top, because an equal first tier would hide it
        return {"color": COLOURS[1], "linestyle": "--", "zorder": 3.0}
    return {"color": COLOURS[0], "alpha": 0.25 + 0.75 * share}


def _gaps(values: Sequence[float | None]) -> list[float]:
    """Return a curve with a gap at every key that is not read."""
    return [math.nan if each is None else each for each in values]


def _draw_heads(
    axes: "Axes", drawn: InspectedDeployment, name: str, scaled_rows: Sequence[HeadScores]
) -> None:
    """Draw a thin line per head, the mean over heads, and the mean spread around it."""
    assert drawn.scores is not None
    colour = COLOURS[1] if name == "unscaled" else COLOURS[0]
    distances = _curve_distances(drawn)
    curves = expected_curves(drawn.layers, drawn.native, drawn.tables, name, distances)
    for curve in curves:
        axes.plot(distances, _gaps(curve), color="0.7", linewidth=0.5)
    means = [_mean(column) for column in zip(*curves, strict=True)]
    axes.plot(distances, means, color=colour, linewidth=1.5)
    rows = [*scaled_rows, *drawn.scores.others]
    for column, distance in enumerate(drawn.distances[1:], start=1):
        expected, spread = (
            [values[column] for values in each]
            for each in ([row.expected for row in rows], [row.spread for row in rows])
        )
        if any(value is not None for value in expected):
            axes.errorbar(distance, _mean(expected), _mean(spread), color=colour, capsize=3)
    axes.set_ylabel("expected score (logit)")
    _finish(axes, drawn, f"expected score, {name}: {len(rows)} heads, their mean and mean spread")


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean over the heads that read the key; NaN: none does."""
    seen = [value for value in values if value is not None]
    return sum(seen) / len(seen) if seen else math.nan


def _finish(axes: "Axes", drawn: InspectedDeployment, title: str) -> None:
    """Draw distance on a logarithmic axis, and mark the end of the native length."""
    axes.set_xscale("log", base=2)
    powers = [each for each in drawn.distances if each > 0][:-1]
    ticks = powers[:: max(1, -(-len(powers) // _TICKS))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.axvline(drawn.deployment.native_len, color="0.4", linestyle=":", linewidth=1)
    axes.set_xlabel("distance (tokens, log scale); dotted: native length")
    axes.set_title(title, fontsize="small")
    tidy(axes)
