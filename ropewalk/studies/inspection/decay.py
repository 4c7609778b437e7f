"""The upper bound of attention against distance, under every table of a deployment.

Shapes: M = distances.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.rope import Frequencies, NativeRope, PositionMethod, Tier, Unscaled, longest
from ropewalk.rope.decay import decay_bound
from ropewalk.studies.harness.text_table import aligned, number


@dataclass(frozen=True, slots=True)
class DeploymentTables:
    """All tables that the model's layers can use under one deployment."""

    unscaled: Frequencies
    tiers: Mapping[str, Frequencies]  # "512 (2x)" -> table, ascending
    others: Mapping[str, Frequencies]  # layer types that a deployment does not scale
    # Position methods by tier, and the last query of the tier.
    methods: Mapping[str, tuple[PositionMethod, int]] = field(default_factory=dict)

    def seen(self, name: str, distances: Sequence[int]) -> list[int | None]:
        """Return the distances at which keys are seen under a table; None: they are not read."""
        if name not in self.methods:
            return [*distances]
        method, position = self.methods[name]
        return method.seen_distances(position, distances)

    def bounds(self, name: str, distances: Sequence[int]) -> list[float | None]:
        """Return the upper bound at each distance under a table; None: the key is not read."""
        table = self.named()[name]
        (bounds,) = read_values(
            self.seen(name, distances), lambda seen_M: decay_bound(table, seen_M)[None]
        )
        return bounds

    def named(self) -> dict[str, Frequencies]:
        return {"unscaled": self.unscaled, **self.tiers, **self.others}


def read_values(
    seen: Sequence[int | None], values: Callable[[Tensor], Tensor]
) -> list[list[float | None]]:
    """Return rows of values at the distances at which keys are seen; None: a key is not read.

    `values` maps distances, int64 [M], to rows, [rows, M].
    """
    rows = values(torch.tensor([each or 0 for each in seen]))
    return [
        [None if each is None else value for value, each in zip(row, seen, strict=True)]
        for row in rows.tolist()
    ]


def tables_of(deployment: Deployment, native: NativeRope) -> DeploymentTables:
    """Return the tables with and without scaling."""
    scaled = native.tables[native.scaled_layer_type]
    return DeploymentTables(
        scaled.frequencies(Unscaled()),
        {heading(tier): tier_frequencies(tier, native) for tier in deployment.own_tiers},
        {
            layer_type: table.frequencies()
            for layer_type, table in sorted(native.tables.items())
            if layer_type != native.scaled_layer_type
        },
        {
            heading(tier): (tier.profile.positions, tier.ceiling - 1)
            for tier in deployment.own_tiers
            if tier.profile.positions is not None
        },
    )


def tier_frequencies(tier: Tier, native: NativeRope) -> Frequencies:
    """Return the table of a tier, with the position method's factor of cos and sin."""
    table = native.tables[native.scaled_layer_type].frequencies(tier.profile.scaling)
    positions = tier.profile.positions
    if positions is None:
        return table
    return replace(table, attention_factor=table.attention_factor * positions.attention_factor)


def heading(tier: Tier) -> str:
    """Return the heading of a tier's column, for example `512 (2x)`."""
    return f"{tier.ceiling} ({tier.label})"


def distances_of(deployment: Deployment) -> tuple[int, ...]:
    """Return 0, 1, 2, 4, ... and the max distance in the longest tier."""
    last = longest(deployment.own_tiers) - 1
    powers = (2**power for power in range(last.bit_length()))
    return tuple(sorted({0, *powers, last}))


def decay_lines(
    deployment: Deployment, tables: DeploymentTables, distances: Sequence[int]
) -> list[str]:
    """Return lines with a row per distance and a column per table."""
    bounds = {name: tables.bounds(name, distances) for name in tables.named()}
    lines = _by_distance(
        f"deployment {deployment.name}: upper bound of attention by distance in tokens, up to a "
        "factor that the vectors set",
        *(distances, bounds, ".4g", 10),
    )
    if any(tier.profile.logn_len is not None for tier in deployment.own_tiers):
        lines.append(f"{'':>10}  without the log-n switch, which depends on the query's position")
    return lines


def seen_lines(
    deployment: Deployment, tables: DeploymentTables, distances: Sequence[int]
) -> list[str]:
    """Return lines with the distance at which the last query of a tier sees each key."""
    if not tables.methods:
        return []
    seen = {name: tables.seen(name, distances) for name in tables.methods}
    title = (
        f"deployment {deployment.name}: distance at which the last query of a tier sees a key, by "
        "true distance (-: not read)"
    )
    return ["", *_by_distance(title, distances, seen, "", max(10, *map(len, seen)))]


def _by_distance(
    title: str,
    distances: Sequence[int],
    columns: Mapping[str, Sequence[float | None]],
    form: str,
    least: int,
) -> list[str]:
    rows = [
        [str(distance), *(number(values[at], form) for values in columns.values())]
        for at, distance in enumerate(distances)
    ]
    return [title, *aligned([["distance", *columns], *rows], [10, *[least] * len(columns)])]


def decay_json(tables: DeploymentTables, distances: Sequence[int]) -> dict[str, Any]:
    """Return the JSON value, with tiers in the order of the deployment."""
    bounds = partial(tables.bounds, distances=distances)
    found: dict[str, Any] = {
        "distances": distances,
        "unscaled": bounds("unscaled"),
        "tiers": [bounds(name) for name in tables.tiers],
        "other_layer_types": {name: bounds(name) for name in tables.others},
    }
    if tables.methods:
        found["seen_at"] = [tables.seen(name, distances) for name in tables.tiers]
    return found
