"""`ropewalk inspect [MODEL]`: tables, the cost of a context, and attention by distance."""

from pathlib import Path
from typing import Any

import click

from server.sentences import log_to_stderr, sentences
from server.settings.flags import SettingsCommand, given, with_flags
from server.settings.load import load_settings
from server.settings.sections import DeploymentSettings, ModelSettings, SourceSettings


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory for weights and cache together: says the longest context that fits.",
)
@click.option(
    "--heads",
    metavar="LAYERS",
    help="Load the weights, and say what the heads of these layers (all, or 0,5,...) make of "
    "distance on a sample text.",
)
@click.option(
    "--sample-text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The text for --heads. Default: Python's standard library, the files held out from "
    "training.",
)
@click.option(
    "--sample-tokens",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="At most so much of it.  [default: 2048]",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw attention against distance there, .png or .svg; needs matplotlib, the extra `plot`.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@with_flags(SourceSettings, ModelSettings, DeploymentSettings)
def inspect(
    memory_gib: float | None,
    heads: str | None,
    sample_text: Path | None,
    sample_tokens: int | None,
    plot_path: Path | None,
    *,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show MODEL's tables tier by tier, what a context costs, and attention by distance.

    For each pair of dimensions: its wavelength in tokens, and whether a tier keeps it, blends it
    or interpolates it. Then the upper bound of attention against distance, with and without
    scaling. Loads weights for --heads only. Deployments come from the same flags, variables and
    file as in `serve`.
    """
    with sentences():
        settings = load_settings(given(flags))
        # Imported here, so that a wrong setting does not wait for the import of torch.
        from server.inspection.heads import heads_options  # noqa: PLC0415
        from server.inspection.report import InspectOptions, inspect_model  # noqa: PLC0415

        log_to_stderr()
        wanted = heads_options(heads, sample_text, sample_tokens)
        options = InspectOptions(memory_gib, wanted, plot_path, as_json)
        click.echo(inspect_model(settings, options))
