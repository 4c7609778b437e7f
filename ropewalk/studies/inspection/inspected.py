"""One deployment as `inspect` shows it: its tiers pair by pair, its bounds and its scores."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.rope import NativeRope, Tier
from ropewalk.studies.harness.text_table import aligned
from ropewalk.studies.inspection.decay import (
    DeploymentTables,
    decay_json,
    distances_of,
    heading,
    tables_of,
    tier_frequencies,
)
from ropewalk.studies.inspection.layer_statistics import LayerStatistics
from ropewalk.studies.inspection.scores import DeploymentScores, deployment_scores, scores_json


@dataclass(frozen=True, slots=True)
class InspectedDeployment:
    """A deployment, the tables that it can use, and the statistics of the model's layers."""

    deployment: Deployment
    native: NativeRope
    layers: Mapping[int, LayerStatistics]  # empty: no weights were loaded
    tables: DeploymentTables
    distances: tuple[int, ...]  # tokens
    scores: DeploymentScores | None  # None: no weights were loaded

    def table_lines(self) -> list[str]:
        """Return lines with a row per pair and a column per tier."""
        own, native = self.deployment, self.native
        untouched = native.tables[native.scaled_layer_type].frequencies().inv_freq_P.double()
        tiers = [tier_json(tier, native) for tier in own.own_tiers]
        rows = [
            ["pair", "native", "turns in L", *map(heading, own.own_tiers)],
            ["", "", "", *(f"{tier['attention_factor']:.4f}" for tier in tiers)],
        ]
        for at, frequency in enumerate(untouched.tolist()[: native.rotary.num_rotating]):
            wavelength = 2 * math.pi / frequency
            about = [str(at), f"{wavelength:.4g}", f"{own.original_len / wavelength:.3g}"]
            pairs = (tier["pairs"][at] for tier in tiers)
            rows.append([*about, *(f"{one['wavelength']:.4g} {one['state'][0]}" for one in pairs)])
        head, factors, *lines = aligned(rows, [4, 12, 10, *[16] * len(tiers)])
        return [
            f"deployment {own.name}: {own.rope_type}, {own.policy}; by tier, wavelength in tokens "
            "(k kept, b blended, i interpolated)",
            head,
            "attention factor".rjust(30) + factors[30:],
            *lines,
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON value."""
        own = self.deployment
        return {
            "name": own.name,
            "rope_type": own.rope_type,
            "policy": own.policy,
            "native_len": own.native_len,
            "tiers": [tier_json(tier, self.native) for tier in own.own_tiers],
            "decay": decay_json(self.tables, self.distances),
            "scores": None if self.scores is None else scores_json(self.scores),
        }


def inspected(
    deployment: Deployment, native: NativeRope, layers: Mapping[int, LayerStatistics]
) -> InspectedDeployment:
    """Return a deployment's tables, and its scores if the layers were measured."""
    tables, distances = tables_of(deployment, native), distances_of(deployment)
    scores = deployment_scores(layers, native, tables, distances) if layers else None
    return InspectedDeployment(deployment, native, layers, tables, distances, scores)


def tier_json(tier: Tier, native: NativeRope) -> dict[str, Any]:
    """Return a tier with its pairs in order, fastest first, compared with the untouched table.

    A wavelength is the tokens of a whole turn. A ratio is the native frequency over the tier's: 1
    is kept, the tier's factor is linear.
    """
    table = native.tables[native.scaled_layer_type]
    scaled = tier_frequencies(tier, native)
    both_P = (each.inv_freq_P.double().tolist() for each in (table.frequencies(), scaled))
    return {
        "ceiling": tier.ceiling,
        "factor": tier.factor,
        "rope_type": tier.profile.scaling.rope_type,
        "attention_factor": scaled.attention_factor,
        "pairs": [
            {
                "wavelength": 2 * math.pi / own,
                "ratio": untouched / own,
                "state": _state(untouched / own, tier.factor),
            }
            for untouched, own in islice(zip(*both_P, strict=True), table.rotary.num_rotating)
        ],
    }


def _state(ratio: float, factor: float) -> str:
    if abs(ratio - 1) < 1e-5:
        return "kept"
    return "interpolated" if ratio >= factor * (1 - 1e-5) else "blended"
