"""Attention against distance, drawn: the bound, and what the heads are expected to give."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model_runtime.deployment import Deployment
from rope import decay_bound
from server.inspected_decay import DeploymentTables
from server.inspected_scores import DeploymentScores, HeadScores
from server.plotting import COLOURS, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 500  # of a curve, evenly on the logarithmic axis
_TICKS = 7


@dataclass(frozen=True, slots=True)
class DrawnDeployment:
    """A row of the picture."""

    deployment: Deployment
    tables: DeploymentTables
    distances: tuple[int, ...]
    scores: DeploymentScores | None  # None: no weights were loaded


def plot(drawn: Sequence[DrawnDeployment], title: str, path: Path) -> None:
    """A row per deployment: the bound and, with scores, those without and with scaling.

    Raises OSError where the file cannot be written.
    """
    # Optional, and slow to import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    num_columns = 3 if any(each.scores for each in drawn) else 1
    figure = Figure(figsize=(2.5 + 5.5 * num_columns, 1 + 4 * len(drawn)), layout="constrained")
    grid = figure.subplots(len(drawn), num_columns, squeeze=False)
    for row, each in zip(grid, drawn, strict=True):
        _draw_bounds(row[0], each)
        if each.scores is not None:
            longest = list(each.scores.tiers)[-1]
            _draw_scores(row[1], each, "unscaled", each.scores.unscaled)
            _draw_scores(row[2], each, longest, each.scores.tiers[longest])
            row[2].sharey(row[1])
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _draw_bounds(axes: "Axes", drawn: DrawnDeployment) -> None:
    last = drawn.distances[-1]
    powers = torch.linspace(0, torch.tensor(float(last)).log2().item(), _POINTS)
    distances_M = torch.tensor(sorted({min(last, round(each)) for each in (2**powers).tolist()}))
    tables = drawn.tables.named()
    for number, (name, table) in enumerate(tables.items()):
        is_unscaled = name == "unscaled"
        axes.plot(
            distances_M.tolist(),
            decay_bound(table, distances_M).tolist(),
            color=COLOURS[1] if is_unscaled else COLOURS[0],
            linestyle="--" if is_unscaled else "-",
            alpha=1.0 if is_unscaled else 0.25 + 0.75 * number / (len(tables) - 1),
            linewidth=1,
            label=name,
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("upper bound, relative")
    axes.legend(frameon=False, fontsize="small")
    _finish(axes, drawn, f"{drawn.deployment.name}: upper bound")


def _draw_scores(
    axes: "Axes", drawn: DrawnDeployment, name: str, rows: Sequence[HeadScores]
) -> None:
    """A thin line per head; the mean over heads, and the heads' mean spread around it."""
    assert drawn.scores is not None
    rows = [*rows, *drawn.scores.others]
    for row in rows:
        points = [
            (distance, score)
            for distance, score in zip(drawn.distances, row.expected, strict=True)
            if score is not None and distance > 0
        ]
        axes.plot(*zip(*points, strict=True), color="0.6", linewidth=0.6)
    means, spreads = [], []
    for column in range(1, len(drawn.distances)):
        means.append(_mean([row.expected[column] for row in rows]))
        spreads.append(_mean([row.spread[column] for row in rows]))
    axes.errorbar(
        drawn.distances[1:],
        means,
        yerr=spreads,
        color=COLOURS[0] if name != "unscaled" else COLOURS[1],
        marker="o",
        markersize=4,
        capsize=3,
    )
    axes.set_ylabel("expected score (logit)")
    _finish(axes, drawn, f"expected score, {name}: {len(rows)} heads, their mean and mean spread")


def _mean(values: Sequence[float | None]) -> float:
    """Over the heads that see so far; NaN, which is not drawn, where none does."""
    seen = [value for value in values if value is not None]
    return sum(seen) / len(seen) if seen else float("nan")


def _finish(axes: "Axes", drawn: DrawnDeployment, title: str) -> None:
    """Distance on a logarithmic axis, and where the native length ends."""
    axes.set_xscale("log", base=2)
    powers = [each for each in drawn.distances if each > 0][:-1]
    ticks = powers[:: max(1, -(-len(powers) // _TICKS))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.axvline(drawn.deployment.native_len, color="0.4", linestyle=":", linewidth=1)
    axes.set_xlabel("distance (tokens); dotted: native length")
    axes.set_title(title, fontsize="small")
    tidy(axes)
