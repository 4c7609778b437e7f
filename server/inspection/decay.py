"""The upper bound of attention against distance, under every table of a deployment.

Shapes: M = distances.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from model_runtime.deployment import Deployment
from rope import Frequencies, NativeRope, Unscaled, decay_bound, longest


@dataclass(frozen=True, slots=True)
class DeploymentTables:
    """All tables that the model's layers can use under one deployment."""

    unscaled: Frequencies
    tiers: Mapping[str, Frequencies]  # "512 (2x)" -> table, ascending
    others: Mapping[str, Frequencies]  # layer types that a deployment does not scale

    def named(self) -> dict[str, Frequencies]:
        """Return all tables by the headings of their columns."""
        return {"unscaled": self.unscaled, **self.tiers, **self.others}


@dataclass(frozen=True, slots=True)
class DecayBounds:
    """The upper bound at some distances, by table."""

    distances: tuple[int, ...]  # tokens
    by_table: Mapping[str, tuple[float, ...]]  # by DeploymentTables' names


def tables_of(deployment: Deployment, native: NativeRope) -> DeploymentTables:
    """Return the tables with and without scaling."""
    scaled = native.tables[native.scaled_layer_type]
    return DeploymentTables(
        scaled.frequencies(Unscaled()),
        {
            f"{tier.ceiling} ({tier.factor:g}x)": scaled.frequencies(tier.profile.scaling)
            for tier in deployment.own_tiers
        },
        {
            layer_type: table.frequencies()
            for layer_type, table in sorted(native.tables.items())
            if layer_type != native.scaled_layer_type
        },
    )


def distances_of(deployment: Deployment) -> tuple[int, ...]:
    """Return 0, 1, 2, 4, ... and the max distance in the longest tier."""
    last = longest(deployment.own_tiers) - 1
    powers = (2**power for power in range(last.bit_length()))
    return tuple(sorted({0, *powers, last}))


def decay_bounds(tables: DeploymentTables, distances: tuple[int, ...]) -> DecayBounds:
    """Return one number for each table and distance."""
    distances_M = torch.tensor(distances)
    return DecayBounds(
        distances,
        {
            name: tuple(decay_bound(table, distances_M).tolist())
            for name, table in tables.named().items()
        },
    )


def decay_lines(deployment: Deployment, bounds: DecayBounds) -> list[str]:
    """Return lines with a row per distance and a column per table."""
    widths = {name: max(len(name), 10) for name in bounds.by_table}
    head = "  ".join(name.rjust(width) for name, width in widths.items())
    lines = [
        f"deployment {deployment.name}: upper bound of attention by distance in tokens, up to a "
        "factor that the vectors set",
        f"{'distance':>10}  {head}",
    ]
    for row, distance in enumerate(bounds.distances):
        cells = "  ".join(
            f"{bounds.by_table[name][row]:.4g}".rjust(width) for name, width in widths.items()
        )
        lines.append(f"{distance:>10}  {cells}")
    if any(tier.profile.logn_len is not None for tier in deployment.own_tiers):
        lines.append(f"{'':>10}  without the log-n switch, which depends on the query's position")
    return lines


def decay_json(tables: DeploymentTables, bounds: DecayBounds) -> dict[str, Any]:
    """Return the JSON value, with tiers in the order of the deployment."""
    return {
        "distances": bounds.distances,
        "unscaled": bounds.by_table["unscaled"],
        "tiers": [bounds.by_table[name] for name in tables.tiers],
        "other_layer_types": {name: bounds.by_table[name] for name in tables.others},
    }
