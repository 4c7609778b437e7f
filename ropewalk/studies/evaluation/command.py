"""`ropewalk eval lengths|ruler|policies`: quality against context length, or across tiers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from ropewalk.model_runtime.errors import ModelError
from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.settings.flags import SettingsCommand, given, with_flags
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.server.settings.sections import ModelSettings
from ropewalk.server.wording import HelpContext
from ropewalk.studies.evaluation.plan import LengthOptions
from ropewalk.studies.harness.eval_run import EvalError, write_files, writing
from ropewalk.studies.harness.options import Refusal, with_options
from ropewalk.studies.harness.plotting import INSTALL_MATPLOTLIB, can_plot
from ropewalk.studies.harness.progress import printed_progress
from ropewalk.studies.policies.options import CrossingOptions
from ropewalk.studies.ruler.make import TASKS
from ropewalk.studies.ruler.qa import QA_FLAGS

_OptionsT = TypeVar("_OptionsT", LengthOptions, CrossingOptions)
_OF_RULER = ("tasks", "num_samples", "squad", "hotpotqa")
_OF_LENGTHS = (
    *("rope_factor", "native_len", "num_windows", "prefixes", "target_tokens"),
    *("num_queries", "forms", "chat", "depths", "suggest"),
)


class EvalGroup(click.Group):
    """The comparisons; arguments that begin with the name of none are those of `lengths`.

    Until the release after this one, `--tasks` and `--policies` choose the others as well.
    """

    context_class = HelpContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the comparison before the arguments if it is not there."""
        named = args[:1] and args[0] in (*self.commands, *ctx.help_option_names)
        if not named and (args or not ctx.resilient_parsing):  # a shell completes the name
            flags = {each.partition("=")[0] for each in args}
            older = {"--policies": "policies", "--tasks": "ruler"}
            args = [next((older[flag] for flag in older if flag in flags), "lengths"), *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands, each with its whole first sentence."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(200)) for name, each in self.commands.items()]
            )


class EvalCommand(SettingsCommand):
    """One comparison, which knows whose options the others' are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name the comparisons that have an option which this one lacks."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            owners = [
                f"`ropewalk eval {name}`"
                for name, command in evaluate.commands.items()
                if any(error.option_name in param.opts for param in command.params)
            ]
            if not owners:
                raise
            told = f"{error.option_name} is an option of {' and '.join(owners)}"
            raise click.UsageError(told) from error


@click.group("eval", cls=EvalGroup)
def evaluate() -> None:
    """Measure what MODEL knows at each context length, by method and policy.

    `ropewalk eval [MODEL]` is `ropewalk eval lengths [MODEL]`, and its options are those that
    `ropewalk eval lengths --help` lists. All comparisons run through the
    server's own engine. Without MODEL, they measure the embedded demonstration model.
    """


@evaluate.command(cls=EvalCommand)
@click.argument("model", required=False)
@with_options(LengthOptions, without=_OF_RULER, output="ropewalk-eval")
@with_flags(ModelSettings)
def lengths(**flags: Any) -> None:
    """Measure perplexity and retrieval against context length.

    Perplexity is that of the same text under more and more context. A needle is a fact hidden in a
    long text, and retrieval is the share of needles that the model finds.
    """
    _compare_lengths(flags)


@evaluate.command(cls=EvalCommand)
@click.argument("model", required=False)
@with_options(LengthOptions, without=_OF_LENGTHS, output="ropewalk-tasks")
@with_flags(ModelSettings)
def ruler(**flags: Any) -> None:
    """Measure tasks of RULER against context length, and the effective length."""
    files = {task: flags[flag.removeprefix("--")] for task, flag in QA_FLAGS.items()}
    every = tuple(task for task in TASKS if files.get(task, task))
    _compare_lengths({**flags, "tasks": flags["tasks"] or every})


@evaluate.command(cls=EvalCommand)
@click.argument("model", required=False)
@with_options(CrossingOptions, output="ropewalk-crossings")
@click.option("--policies", is_flag=True, expose_value=False, hidden=True)
@with_flags(ModelSettings)
def policies(**flags: Any) -> None:
    """Compare policies for sequences that become longer than a tier while they decode.

    The policies are stale keys, grow, grow-exact and fixed. Stale keys stay as they were rotated
    when they were written, and serving has no such policy.
    """
    # Imported here, so that the other commands do not wait for the import of transformers.
    from ropewalk.studies.evaluation.texts import read_documents  # noqa: PLC0415
    from ropewalk.studies.policies.plot import plot  # noqa: PLC0415
    from ropewalk.studies.policies.report import files_of, table  # noqa: PLC0415
    from ropewalk.studies.policies.run import run_crossings  # noqa: PLC0415

    with _measuring(flags) as settings:
        options = _chosen(CrossingOptions, flags)
        with printed_progress("crossing") as progress:
            report = run_crossings(settings, options, read_documents(flags["texts"]), progress)
        click.echo(table(report.outcomes))
        write_files(options.output, files_of(report))
        _draw(options.output, lambda: plot(report, options.output / "crossings.png"))
        _tell_files(options.output)


def _compare_lengths(flags: Mapping[str, Any]) -> None:
    from ropewalk.studies.evaluation.plot import plot  # noqa: PLC0415
    from ropewalk.studies.evaluation.report import table, write_report  # noqa: PLC0415
    from ropewalk.studies.evaluation.run import run_lengths  # noqa: PLC0415
    from ropewalk.studies.evaluation.suggest import suggestion  # noqa: PLC0415

    with _measuring(flags) as settings:
        options = _chosen(LengthOptions, flags)
        with printed_progress() as progress:
            report = run_lengths(options, settings, progress)
        click.echo(table(report))
        write_report(report, options.output)
        _draw(options.output, lambda: plot(report, options.output))
        if options.suggest:
            text = suggestion(report, report.model, settings.model)
            write_files(options.output, {"suggestion.yaml": f"{text}\n"})
            click.echo(f"\n{text}")
        _tell_files(options.output)


@contextmanager
def _measuring(flags: Mapping[str, Any]) -> Iterator[ServeSettings]:
    """Yield the settings of the model, and convert errors into a Refusal."""
    log_to_stderr()
    try:
        yield load_settings(given({name: flags[name] for name in ModelSettings.model_fields}))
    except (EvalError, ModelError, SettingsError) as error:
        raise Refusal(str(error)) from error


def _chosen(options: type[_OptionsT], flags: Mapping[str, Any]) -> _OptionsT:
    """Return the options of one comparison; its fields have the names of the flags."""
    return options(
        **{each.name: flags[each.name] for each in fields(options) if each.name in flags}
    )


def _draw(folder: Path, plot: Callable[[], None]) -> None:
    if can_plot():
        with writing(folder):
            plot()
    else:
        click.echo(f"plots are not drawn: they need matplotlib: {INSTALL_MATPLOTLIB}", err=True)


def _tell_files(folder: Path) -> None:
    """Print the folder and the names of the files in it, on standard error like the progress."""
    names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file()))
    click.echo(f"files in {folder}: {names}", err=True)
