"""The expected score of every head by distance, under every table of a deployment.

Shapes: H = query heads of a layer, M = distances.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.rope import Frequencies, NativeRope
from ropewalk.rope.decay import Moments, expected_score, score_spread
from ropewalk.studies.harness.text_table import aligned
from ropewalk.studies.inspection.decay import DeploymentTables, read_values
from ropewalk.studies.inspection.layer_statistics import LayerStatistics

_NOTHING_TURNS = Frequencies(torch.empty(0), 1.0)


@dataclass(frozen=True, slots=True)
class HeadScores:
    """One query head's scores by distance; None if the key is not read.

    A layer's sliding window and a position method leave keys out.
    """

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

    def under(name: str, *, is_scaled: bool = True) -> tuple[HeadScores, ...]:
        read = _Read(native, tables, name)
        return tuple(
            row
            for index, layer in layers.items()
            if read.is_scaled(layer) == is_scaled
            for row in _scores(index, layer, read, distances)
        )

    return DeploymentScores(
        distances,
        under("unscaled"),
        {name: under(name) for name in tables.tiers},
        under("unscaled", is_scaled=False),
    )


def expected_curves(
    layers: Mapping[int, LayerStatistics],
    native: NativeRope,
    tables: DeploymentTables,
    name: str,
    distances: Sequence[int],
) -> list[list[float | None]]:
    """Return every head's expected score; None: the key is not read.

    `name` is that of the scaled layers' table, as `DeploymentTables` has it.
    """
    read = _Read(native, tables, name)
    return [
        row
        for layer in layers.values()
        for row in read_values(
            read.seen(layer, distances),
            partial(_moments_at, expected_score, layer, read.table(layer)),
        )
    ]


class _Read(NamedTuple):
    """How layers read keys if the scaled ones have the table with a name."""

    native: NativeRope
    tables: DeploymentTables
    name: str

    def is_scaled(self, layer: LayerStatistics) -> bool:
        return layer.plan.layer_type == self.native.scaled_layer_type

    def table(self, layer: LayerStatistics) -> Frequencies:
        """Return the table that the layer rotates by."""
        layer_type = layer.plan.layer_type
        if layer_type is None:
            return _NOTHING_TURNS
        return self.tables.named()[self.name if self.is_scaled(layer) else layer_type]

    def seen(self, layer: LayerStatistics, distances: Sequence[int]) -> list[int | None]:
        """Return the distances at which the layer sees keys; its window ends at a true one."""
        seen: Sequence[int | None] = distances
        if self.is_scaled(layer):
            seen = self.tables.seen(self.name, distances)
        window = layer.sliding_window
        pairs = zip(distances, seen, strict=True)
        return [each if window is None or true < window else None for true, each in pairs]


def _moments_at(
    moments: Callable[[Moments, Moments, Frequencies, Tensor, float], Tensor],
    layer: LayerStatistics,
    table: Frequencies,
    seen_M: Tensor,
) -> Tensor:
    """Return `expected_score` or `score_spread` of a layer's heads at some distances, [H, M]."""
    return moments(layer.query, layer.key_by_query_head, table, seen_M, layer.scaling)


def _scores(
    index: int, layer: LayerStatistics, read: _Read, distances: Sequence[int]
) -> Iterator[HeadScores]:
    """Return the scores of every query head with the key head that it reads."""
    seen, table = read.seen(layer, distances), read.table(layer)
    expected, spread = (
        read_values(seen, partial(_moments_at, moments, layer, table))
        for moments in (expected_score, score_spread)
    )
    for head, rows in enumerate(zip(expected, spread, strict=True)):
        yield HeadScores(index, head, *map(tuple, rows))


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
    cells = [list(map(_cell, row.expected, row.spread)) for row in rows]
    width = max(len(cell) for row in cells for cell in row)
    head = ["layer", "head", *map(str, distances)]
    lines = [[str(row.layer), str(row.head), *of] for row, of in zip(rows, cells, strict=True)]
    return aligned([head, *lines], [5, 4, *[width] * len(distances)])


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
