"""The expected score of every head by distance, under every table of a deployment.

Shapes: H = query heads of a layer, M = distances.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from model_runtime.deployment import Deployment
from rope import Frequencies, NativeRope, expected_score, score_spread
from server.inspection.decay import DeploymentTables
from server.inspection.layer_statistics import LayerStatistics

_NOTHING_TURNS = Frequencies(torch.empty(0), 1.0)


@dataclass(frozen=True, slots=True)
class HeadScores:
    """One query head's scores by distance; None if beyond the layer's sliding window."""

    layer: int
    head: int
    expected: tuple[float | None, ...]
    spread: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class DeploymentScores:
    """Scores of every head, by table for layers that the deployment scales."""

    distances: tuple[int, ...]  # tokens
    unscaled: tuple[HeadScores, ...]
    tiers: Mapping[str, tuple[HeadScores, ...]]  # by DeploymentTables' names
    others: tuple[HeadScores, ...]  # layers with their own table, or without rotation


def deployment_scores(
    layers: Mapping[int, LayerStatistics],
    native: NativeRope,
    tables: DeploymentTables,
    distances: tuple[int, ...],
) -> DeploymentScores:
    """Return the scores of each layer under its own tables."""

    def under(scaled: Frequencies, *, is_scaled: bool = True) -> tuple[HeadScores, ...]:
        return tuple(
            row
            for index, layer in layers.items()
            if (layer.plan.layer_type == native.scaled_layer_type) == is_scaled
            for row in _scores(index, layer, _table(layer, native, tables, scaled), distances)
        )

    return DeploymentScores(
        distances,
        under(tables.unscaled),
        {name: under(table) for name, table in tables.tiers.items()},
        under(tables.unscaled, is_scaled=False),
    )


def expected_curves(
    layers: Mapping[int, LayerStatistics],
    native: NativeRope,
    tables: DeploymentTables,
    scaled: Frequencies,
    distances: Sequence[int],
) -> list[list[float]]:
    """Return every head's expected score; `scaled` is the table of the scaled layers.

    A curve ends at the end of its layer's sliding window.
    """
    curves: list[list[float]] = []
    for layer in layers.values():
        given = (
            layer.query,
            layer.key_by_query_head,
            _table(layer, native, tables, scaled),
            torch.tensor(_seen(layer, distances)),
            layer.scaling,
        )
        curves += expected_score(*given).tolist()
    return curves


def _table(
    layer: LayerStatistics, native: NativeRope, tables: DeploymentTables, scaled: Frequencies
) -> Frequencies:
    """Return the table that the layer rotates by."""
    layer_type = layer.plan.layer_type
    if layer_type is None:
        return _NOTHING_TURNS
    return scaled if layer_type == native.scaled_layer_type else tables.others[layer_type]


def _seen(layer: LayerStatistics, distances: Sequence[int]) -> list[int]:
    """Return the distances within the layer's window, in ascending order."""
    window = layer.sliding_window
    return [each for each in distances if window is None or each < window]


def _scores(
    index: int, layer: LayerStatistics, table: Frequencies, distances: Sequence[int]
) -> Iterator[HeadScores]:
    """Return the scores of every query head with the key head that it reads."""
    seen = _seen(layer, distances)
    beyond = (None,) * (len(distances) - len(seen))
    given = (layer.query, layer.key_by_query_head, table, torch.tensor(seen), layer.scaling)
    rows = zip(expected_score(*given).tolist(), score_spread(*given).tolist(), strict=True)
    for head, (expected, spread) in enumerate(rows):
        yield HeadScores(index, head, (*expected, *beyond), (*spread, *beyond))


def score_lines(deployment: Deployment, scores: DeploymentScores) -> list[str]:
    """Return a block per table, with a row per query head and a column per distance."""
    blocks = {**scores.tiers, "layers that the deployment does not scale": scores.others}
    if scores.unscaled not in scores.tiers.values():  # the first tier is often equal
        blocks = {"unscaled": scores.unscaled, **blocks}
    lines = []
    for name, rows in blocks.items():
        if rows:
            lines += [
                "",
                f"deployment {deployment.name}, {name}: expected score by distance in tokens, and "
                "its spread",
                *_block(scores.distances, rows),
            ]
    return lines


def _block(distances: Sequence[int], rows: Sequence[HeadScores]) -> list[str]:
    cells = [[_cell(*pair) for pair in zip(row.expected, row.spread, strict=True)] for row in rows]
    width = max(len(cell) for row in cells for cell in row)
    lines = [f"{'layer':>5}  {'head':>4}  " + "  ".join(f"{each:>{width}}" for each in distances)]
    for row, texts in zip(rows, cells, strict=True):
        joined = "  ".join(text.rjust(width) for text in texts)
        lines.append(f"{row.layer:>5}  {row.head:>4}  {joined}")
    return lines


def _cell(expected: float | None, spread: float | None) -> str:
    return "-" if expected is None else f"{expected:.2f}\u00b1{spread:.2f}"


def scores_json(scores: DeploymentScores) -> dict[str, Any]:
    """Return the JSON value, with tiers in the order of the deployment."""
    return {
        "distances": scores.distances,
        "unscaled": [asdict(row) for row in scores.unscaled],
        "tiers": [[asdict(row) for row in rows] for rows in scores.tiers.values()],
        "other_layers": [asdict(row) for row in scores.others],
    }
