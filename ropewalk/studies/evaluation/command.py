"""`ropewalk eval [MODEL]`: quality against context length, by scaling method and policy."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.sentences import sentences
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import load_settings
from ropewalk.server.settings.sections import ModelSettings
from ropewalk.studies.evaluation.plan import LengthOptions
from ropewalk.studies.harness.options import with_options
from ropewalk.studies.harness.plotting import INSTALL_MATPLOTLIB, can_plot
from ropewalk.studies.harness.progress import printed_progress


@click.command("eval", cls=SettingsCommand)
@click.argument("model", required=False)
@with_options(LengthOptions)
@with_flags(ModelSettings)
def evaluate(**flags: Any) -> None:
    """Measure what MODEL knows at each context length, by method and policy.

    Perplexity is that of the same text under more and more context. A needle is a fact hidden in a
    long text, and retrieval is the share of needles that the model finds. Requests go through the
    server's own engine. Without MODEL, the command measures the embedded demonstration model.
    """
    options = LengthOptions(**{each.name: flags.pop(each.name) for each in fields(LengthOptions)})
    with sentences():
        log_to_stderr()
        settings = load_settings(given(flags))
        # Imported here, so that a wrong setting does not wait for the import of transformers.
        from ropewalk.studies.evaluation.plot import plot  # noqa: PLC0415
        from ropewalk.studies.evaluation.record import write_files, writing  # noqa: PLC0415
        from ropewalk.studies.evaluation.report import table, write_report  # noqa: PLC0415
        from ropewalk.studies.evaluation.run import run_lengths  # noqa: PLC0415
        from ropewalk.studies.evaluation.suggest import suggestion  # noqa: PLC0415

        with printed_progress() as progress:
            report = run_lengths(options, settings, progress)
        click.echo(table(report))
        write_report(report, options.output)
        if can_plot():
            with writing(options.output):
                plot(report, options.output)
        else:
            click.echo(f"plots are not drawn: they need matplotlib: {INSTALL_MATPLOTLIB}", err=True)
        if options.suggest:
            text = suggestion(report, report.model, settings.model)
            write_files(options.output, {"suggestion.yaml": f"{text}\n"})
            click.echo(f"\n{text}")
        _tell_files(options.output)


def _tell_files(folder: Path) -> None:
    """Print the folder and the names of the files in it, on standard error like the progress."""
    names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file()))
    click.echo(f"files in {folder}: {names}", err=True)
