"""`ropewalk inspect`: tables tier by tier, the cost of a context, and attention by distance."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from model_runtime.deployment import Deployment
from model_runtime.loading.low_bits.planned import planned_storage
from model_runtime.loading.model_config import ModelConfig
from rope import NativeRope, Tier
from server.inspection.costs import Costs, cost_lines, costs_of, too_small
from server.inspection.decay import (
    DecayBounds,
    DeploymentTables,
    decay_bounds,
    decay_json,
    decay_lines,
    distances_of,
    seen_lines,
    tables_of,
    tier_frequencies,
)
from server.inspection.heads import (
    HeadsOptions,
    InspectedHeads,
    head_lines,
    heads_json,
    inspect_heads,
    parse_layers,
    read_sample,
)
from server.inspection.plot import DrawnDeployment, plot
from server.inspection.scores import DeploymentScores, deployment_scores, score_lines, scores_json
from server.settings.load import ServeSettings, SettingsError
from server.startup.dry_run import outline_of
from server.startup.serving_plan import plan_deployments
from server.study.plotting import PlotError, check_can_plot


@dataclass(frozen=True, slots=True)
class PairInTier:
    """One pair of dimensions in one tier."""

    wavelength: float  # tokens for a whole turn
    ratio: float  # of the native frequency to the tier's: 1 is kept, the tier's factor is linear
    state: str  # kept, blended, interpolated


@dataclass(frozen=True, slots=True)
class TierTable:
    """One tier of a deployment, with its pairs in order, fastest first."""

    ceiling: int  # tokens
    factor: float
    rope_type: str
    attention_factor: float
    pairs: tuple[PairInTier, ...]


@dataclass(frozen=True, slots=True)
class InspectedDeployment:
    """All results about one deployment."""

    deployment: Deployment
    tiers: tuple[TierTable, ...]
    tables: DeploymentTables
    bounds: DecayBounds
    scores: DeploymentScores | None  # None: not requested


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """The command line options of `inspect` that are not settings."""

    memory_gib: float | None = None
    heads: HeadsOptions | None = None  # None: no weights are loaded
    plot_path: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The output of `inspect`."""

    text: str  # lines, or JSON
    problem: str | None  # why the command fails although it reports


def inspect_model(settings: ServeSettings, options: InspectOptions) -> Report:
    """Return the report as text or JSON, and draw the plot. Raises ModelError or SettingsError.

    Loads weights only if heads are requested, after everything else has been checked.
    """
    if options.plot_path is not None:
        try:
            check_can_plot(options.plot_path)
        except PlotError as error:
            raise SettingsError(str(error)) from error
    outline = outline_of(settings)
    native = outline.native()
    deployments = plan_deployments(settings, native)
    low_bits = planned_storage(outline, settings.weights, is_divided=False)
    costs = costs_of(outline, deployments, settings.page_size, options.memory_gib, low_bits)
    heads = None
    if options.heads is not None:
        layers = parse_layers(options.heads.layers, len(outline.layers()))
        heads = inspect_heads(settings, layers, read_sample(options.heads), options.heads)
    found = [_inspected(deployment, native, heads) for deployment in deployments]
    if options.plot_path is not None:
        title = f"{outline.architecture}: attention against distance"
        _draw(native, found, heads, title, options.plot_path)
    problem = too_small(costs, settings.page_size)
    if options.as_json:
        return Report(json.dumps(_as_json(outline, native, costs, found, heads), indent=2), problem)
    return Report("\n".join(_lines(outline, native, costs, found, heads)), problem)


def _lines(
    outline: ModelConfig,
    native: NativeRope,
    costs: Costs,
    found: Sequence[InspectedDeployment],
    heads: InspectedHeads | None,
) -> list[str]:
    lines = [*_model_lines(outline, native, costs), *cost_lines(costs)]
    for each in found:
        lines += ["", *_table_lines(each.deployment, native, each.tiers)]
        lines += ["", *decay_lines(each.deployment, each.bounds)]
        lines += seen_lines(each.deployment, each.tables, each.bounds)
    if heads is not None:
        lines += ["", *head_lines(heads)]
    for each in found:
        if each.scores is not None:
            lines += score_lines(each.deployment, each.scores)
    return lines


def _draw(
    native: NativeRope,
    found: Sequence[InspectedDeployment],
    heads: InspectedHeads | None,
    title: str,
    path: Path,
) -> None:
    """Draw the plot. Raises SettingsError if the file cannot be written."""
    layers = {} if heads is None else heads.layers
    drawn = [
        DrawnDeployment(
            each.deployment, native, each.tables, each.bounds.distances, layers, each.scores
        )
        for each in found
    ]
    try:
        plot(drawn, title, path)
    except OSError as error:
        raise SettingsError(f"--plot: cannot write {path}: {error.strerror}") from error


def _inspected(
    deployment: Deployment, native: NativeRope, heads: InspectedHeads | None
) -> InspectedDeployment:
    tables, distances = tables_of(deployment, native), distances_of(deployment)
    scores = None
    if heads is not None:
        scores = deployment_scores(heads.layers, native, tables, distances)
    return InspectedDeployment(
        deployment,
        tuple(_tier_table(tier, native) for tier in deployment.own_tiers),
        tables,
        decay_bounds(tables, distances),
        scores,
    )


def _tier_table(tier: Tier, native: NativeRope) -> TierTable:
    """Compare the tier's table with the untouched one."""
    table = native.tables[native.scaled_layer_type]
    untouched_P = table.frequencies().inv_freq_P.double()
    scaled = tier_frequencies(tier, native)
    pairs = []
    both_P = zip(untouched_P.tolist(), scaled.inv_freq_P.double().tolist(), strict=True)
    for untouched, own in islice(both_P, table.rotary.num_rotating):
        ratio = untouched / own
        pairs.append(PairInTier(2 * math.pi / own, ratio, _state(ratio, tier.factor)))
    return TierTable(
        tier.ceiling,
        tier.factor,
        tier.profile.scaling.rope_type,
        scaled.attention_factor,
        tuple(pairs),
    )


def _state(ratio: float, factor: float) -> str:
    if abs(ratio - 1) < 1e-5:
        return "kept"
    return "interpolated" if ratio >= factor * (1 - 1e-5) else "blended"


def _model_lines(outline: ModelConfig, native: NativeRope, costs: Costs) -> list[str]:
    layers = outline.layers()
    rotary = native.rotary
    standing = rotary.num_pairs - rotary.num_rotating
    still = f" and {standing} that stand still" if standing else ""
    shapes = " + ".join(
        f"{count} layer{'s' if count > 1 else ''} x {shape.num_key_heads} heads x "
        f"({shape.key_dim} + {shape.value_dim})"
        for shape, count in Counter(layers.values()).items()
    )
    dtype = str(outline.dtype).removeprefix("torch.")
    lines = [
        f"model            {outline.architecture}, {dtype} on {outline.device}",
        f"rotary           {rotary.num_rotating} pairs{still}, base {rotary.rope_theta:g}, "
        f"trained as {native.method.scaling.rope_type} for {native.native_len} tokens",
        f"cache            {costs.kv_bytes_per_token} bytes a token: {shapes} in {dtype}",
    ]
    others = sorted(set(native.tables) - {native.scaled_layer_type})
    if others:
        lines.append(f"not scaled       layers of type {', '.join(others)} keep their own table")
    return lines


def _table_lines(
    deployment: Deployment, native: NativeRope, tables: Sequence[TierTable]
) -> list[str]:
    """Return lines with a row per pair and a column per tier."""
    untouched = native.tables[native.scaled_layer_type].frequencies().inv_freq_P.double()
    heads = [f"{table.ceiling} ({table.factor:g}x)" for table in tables]
    widths = [max(len(head), 16) for head in heads]
    head = "  ".join(text.rjust(width) for text, width in zip(heads, widths, strict=True))
    logit = "  ".join(
        f"{table.attention_factor:.4f}".rjust(width)
        for table, width in zip(tables, widths, strict=True)
    )
    lines = [
        f"deployment {deployment.name}: {deployment.rope_type}, {deployment.policy}; by tier, "
        "wavelength in tokens (k kept, b blended, i interpolated)",
        f"{'pair':>4}  {'native':>12}  {'turns in L':>10}  {head}",
        f"{'attention factor':>30}  {logit}",
    ]
    for pair, frequency in enumerate(untouched.tolist()[: native.rotary.num_rotating]):
        wavelength = 2 * math.pi / frequency
        cells = "  ".join(
            f"{table.pairs[pair].wavelength:.4g} {table.pairs[pair].state[0]}".rjust(width)
            for table, width in zip(tables, widths, strict=True)
        )
        turns = deployment.original_len / wavelength
        lines.append(f"{pair:>4}  {wavelength:>12.4g}  {turns:>10.3g}  {cells}")
    return lines


def _as_json(
    outline: ModelConfig,
    native: NativeRope,
    costs: Costs,
    found: Sequence[InspectedDeployment],
    heads: InspectedHeads | None,
) -> dict[str, Any]:
    return {
        "architecture": outline.architecture,
        "dtype": str(outline.dtype).removeprefix("torch."),
        "native_len": native.native_len,
        "rotary_dim": native.rotary.rotary_dim,
        "rope_theta": native.rotary.rope_theta,
        "costs": asdict(costs),
        "heads": None if heads is None else heads_json(heads),
        "deployments": [
            {
                "name": each.deployment.name,
                "rope_type": each.deployment.rope_type,
                "policy": each.deployment.policy,
                "native_len": each.deployment.native_len,
                "tiers": [asdict(table) for table in each.tiers],
                "decay": decay_json(each.tables, each.bounds),
                "scores": None if each.scores is None else scores_json(each.scores),
            }
            for each in found
        ],
    }
