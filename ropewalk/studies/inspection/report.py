"""`ropewalk inspect`: tables tier by tier, the cost of a context, and attention by distance."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.model_runtime.attention.quantised.page_format import EXACT
from ropewalk.model_runtime.engine.memory.cache_size import gpu_bytes
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.loading.notes import notes_of
from ropewalk.rope import NativeRope
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.planning.dry_run import outline_of
from ropewalk.server.startup.planning.planned_deployments import plan_deployments
from ropewalk.server.startup.planning.serving_plan import step_limits
from ropewalk.studies.harness.plotting import PlotError, check_can_plot
from ropewalk.studies.inspection.costs import Costs, cost_lines, costs_of, too_small
from ropewalk.studies.inspection.decay import decay_lines, seen_lines
from ropewalk.studies.inspection.heads import (
    InspectedHeads,
    check_sample,
    head_lines,
    heads_json,
    inspect_heads,
    parse_layers,
    read_sample,
)
from ropewalk.studies.inspection.inspected import InspectedDeployment, inspected
from ropewalk.studies.inspection.options import InspectOptions
from ropewalk.studies.inspection.plot import plot
from ropewalk.studies.inspection.scores import score_lines


@dataclass(frozen=True, slots=True)
class Report:
    """The output of `inspect`."""

    text: str  # lines, or JSON
    problem: str | None  # why the command fails although it reports


def inspect_model(settings: ServeSettings, options: InspectOptions) -> Report:
    """Return the report as text or JSON, and draw the plot. Raises ModelError or SettingsError.

    Loads weights only if heads are requested, after everything else has been checked.
    """
    check_sample(options)
    if options.plot_path is not None:
        try:
            check_can_plot(options.plot_path)
        except PlotError as error:
            raise SettingsError(str(error)) from error
    outline = outline_of(settings)
    native = outline.native()
    deployments = plan_deployments(settings, native)
    native = native.trained
    low_bits = planned_storage(outline, settings.weights, settings.activations, is_divided=False)
    longest = max(each.max_len for each in deployments)
    layout = outline.cache_layout(settings.page_size, settings.kv_cache_dtype)
    costs = costs_of(
        outline,
        layout.with_windows(outline.windows(), longest),
        longest,
        options.memory_gib,
        low_bits,
        max_chunk=step_limits(settings, gpu_bytes(outline.device))["max_num_batched_tokens"],
    )
    heads = None
    if options.heads is not None:
        layers = parse_layers(options.heads, len(outline.layers()))
        heads = inspect_heads(settings, layers, read_sample(options), options)
    found = [inspected(each, native, heads.layers if heads else {}) for each in deployments]
    if options.plot_path is not None:
        try:
            title = f"{outline.architecture}: attention against distance"
            plot(found, title, options.plot_path)
        except OSError as error:
            raise SettingsError(
                f"--plot: cannot write {options.plot_path}: {error.strerror}"
            ) from error
    if options.as_json:
        text = json.dumps(_as_json(outline, native, costs, found, heads), indent=2)
    else:
        text = "\n".join(_lines(outline, native, costs, found, heads))
    return Report(text, too_small(costs, settings.page_size))


def _lines(
    outline: ModelConfig,
    native: NativeRope,
    costs: Costs,
    found: Sequence[InspectedDeployment],
    heads: InspectedHeads | None,
) -> list[str]:
    lines = [*_model_lines(outline, native, costs), *cost_lines(costs, outline.device.type)]
    for each in found:
        lines += ["", *each.table_lines()]
        lines += ["", *decay_lines(each.deployment, each.tables, each.distances)]
        lines += seen_lines(each.deployment, each.tables, each.distances)
    if heads is not None:
        lines += ["", *head_lines(heads)]
    for each in found:
        if each.scores is not None:
            lines += score_lines(each.deployment, each.scores)
    return lines


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
        f"cache            {costs.kv_bytes_per_token} bytes a token: {shapes} in "
        f"{dtype if costs.kv_format == EXACT else costs.kv_format}",
    ]
    if costs.kv_windows is not None:
        lines.append(
            f"windows          {costs.kv_windows}: {costs.kv_bytes_beyond_windows} bytes a token "
            "beyond the windows"
        )
    elif costs.kv_windows_not_held is not None:
        lines.append(
            f"windows          not held, all layers keep all tokens: {costs.kv_windows_not_held}"
        )
    others = sorted(set(native.tables) - {native.scaled_layer_type})
    if others:
        lines.append(f"not scaled       layers of type {', '.join(others)} keep their own table")
    return [*lines, *(f"warning          {each}" for each in notes_of(outline))]


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
        "left_out": list(notes_of(outline)),
        "costs": asdict(costs),
        "heads": None if heads is None else heads_json(heads),
        "deployments": [each.as_json() for each in found],
    }
