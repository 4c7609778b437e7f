"""`ropewalk inspect [MODEL]`: tables, the cost of a context, and attention by distance."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.settings.sections import DeploymentSettings, ModelSettings, SourceSettings
from ropewalk.server.wording import printable
from ropewalk.studies.harness.options import FILE, option, with_options
from ropewalk.studies.harness.plotting import INSTALL_MATPLOTLIB


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """The options of the command line that are not settings."""

    memory_gib: float | None = option(
        "Memory for weights and cache together. The report then states the longest context that "
        "fits. The exit code is 2 if none does.",
        click.FloatRange(min=0, min_open=True),
        metavar="GIB",
    )
    heads: str | None = option(
        "Layers whose attention heads are measured on a sample text: all, or numbers such as 0,5. "
        "The weights are loaded for it.",
        metavar="LAYERS",
    )
    sample_text: Path | None = option(  # noqa: RUF009  # a field
        "Sample text for --heads. Default: files of Python's standard library that the embedded "
        "model was not trained on.",
        FILE,
        metavar="FILE",
    )
    sample_tokens: int | None = option(
        "Most tokens of the sample text.  [default: 2048]", click.IntRange(min=2)
    )
    plot_path: Path | None = option(  # noqa: RUF009  # a field
        "File for a plot of attention against distance, .png or .svg. Needs matplotlib: "
        f"{INSTALL_MATPLOTLIB}.",
        FILE,
        flag="--plot",
        metavar="FILE",
    )
    as_json: bool = option(
        "Print one JSON object instead of text.",
        default=False,
        flag="--json",
        is_flag=True,
        metavar=None,
        show_default=False,
    )


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@with_options(InspectOptions)
@with_flags(SourceSettings, ModelSettings, DeploymentSettings)
def inspect(**flags: Any) -> None:
    """Show MODEL's tables tier by tier, what a context costs, and attention by distance.

    A tier is a context length with a rotation table of its own. The report has a row for each pair
    of rotated dimensions: its wavelength in tokens, and whether the tier keeps, blends or
    interpolates it. An upper bound of attention against distance follows, with and without scaling.
    The weights are loaded for --heads only. The settings are those of `serve`.
    """
    options = InspectOptions(**{each.name: flags.pop(each.name) for each in fields(InspectOptions)})
    with sentences():
        settings = load_settings(given(flags))
        # Imported here, so that a wrong setting does not wait for the import of torch.
        from ropewalk.studies.inspection.report import inspect_model  # noqa: PLC0415

        log_to_stderr()
        report = inspect_model(settings, options)
        click.echo(printable(report.text))
        if report.problem is not None:
            raise SettingsError(report.problem)
