"""`ropewalk inspect [MODEL]`: tables, the cost of a context, and attention by distance."""

from dataclasses import fields
from typing import Any

import click

from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.settings.sections import DeploymentSettings, ModelSettings, SourceSettings
from ropewalk.server.wording import printable
from ropewalk.studies.harness.options import with_options
from ropewalk.studies.inspection.options import InspectOptions


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
    with sentences() as teller:
        settings = load_settings(given(flags))
        teller.tell_of_imports()
        # Imported here, so that a wrong setting does not wait for the import of torch.
        from ropewalk.studies.inspection.report import inspect_model  # noqa: PLC0415

        log_to_stderr()
        report = inspect_model(settings, options)
        click.echo(printable(report.text))
        if report.problem is not None:
            raise SettingsError(report.problem)
