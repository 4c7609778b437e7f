"""`ropewalk inspect [MODEL]`: tables, the cost of a context, and attention by distance."""

from pathlib import Path
from typing import Any

import click

from server.log_lines import log_to_stderr
from server.printable import printable
from server.sentences import sentences
from server.settings.flags import SettingsCommand, given, with_flags
from server.settings.load import SettingsError, load_settings
from server.settings.sections import DeploymentSettings, ModelSettings, SourceSettings
from server.study.plotting import INSTALL_MATPLOTLIB


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory for weights and cache together. The report then states the longest context that "
    "fits. The exit code is 2 if none does.",
)
@click.option(
    "--heads",
    metavar="LAYERS",
    help="Layers whose attention heads are measured on a sample text: all, or numbers such as 0,5. "
    "The weights are loaded for it.",
)
@click.option(
    "--sample-text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Sample text for --heads. Default: files of Python's standard library that the embedded "
    "model was not trained on.",
)
@click.option(
    "--sample-tokens",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Most tokens of the sample text.  [default: 2048]",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File for a plot of attention against distance, .png or .svg. Needs matplotlib: "
    f"{INSTALL_MATPLOTLIB}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
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

    A tier is a context length with a rotation table of its own. The report has a row for each pair
    of rotated dimensions: its wavelength in tokens, and whether the tier keeps, blends or
    interpolates it. An upper bound of attention against distance follows, with and without scaling.
    The weights are loaded for --heads only. The settings are those of `serve`.
    """
    with sentences():
        settings = load_settings(given(flags))
        # Imported here, so that a wrong setting does not wait for the import of torch.
        from server.inspection.heads import heads_options  # noqa: PLC0415
        from server.inspection.report import InspectOptions, inspect_model  # noqa: PLC0415

        log_to_stderr()
        wanted = heads_options(heads, sample_text, sample_tokens)
        options = InspectOptions(memory_gib, wanted, plot_path, as_json)
        report = inspect_model(settings, options)
        click.echo(printable(report.text))
        if report.problem is not None:
            raise SettingsError(report.problem)
