"""`ropewalk eval [MODEL]`: perplexity and retrieval, against context length or across tiers."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from model_runtime.errors import ModelError
from server.evaluation.option_values import (
    Comparison,
    ComparisonOption,
    Refusal,
    choose_num_windows,
    choose_output,
    parse_crossings,
    parse_depths,
    parse_forms,
    parse_lens,
    parse_methods,
    parse_rope_policies,
    parse_tasks,
)
from server.evaluation.plan import LengthOptions
from server.evaluation.tasks.make import TASKS
from server.log_lines import log_to_stderr
from server.policy_eval.options import CrossingOptions
from server.settings.flags import SettingsCommand, given, with_flags
from server.settings.load import ServeSettings, SettingsError, load_settings
from server.settings.sections import ModelSettings
from server.study.eval_run import EvalError, write_texts
from server.study.plotting import INSTALL_MATPLOTLIB, can_plot
from server.study.progress import printed_progress

_COUNT = click.IntRange(min=1)
_OptionsT = TypeVar("_OptionsT", LengthOptions, CrossingOptions)

# The options of some comparisons; the others belong to all.
_against_length = partial(
    click.option, cls=ComparisonOption, of=(Comparison.LENGTHS, Comparison.TASKS)
)
_of_texts = partial(click.option, cls=ComparisonOption, of=(Comparison.LENGTHS,))
_of_windows = partial(
    click.option, cls=ComparisonOption, of=(Comparison.LENGTHS, Comparison.POLICIES)
)
_of_tasks = partial(click.option, cls=ComparisonOption, of=(Comparison.TASKS,))
_across_tiers = partial(click.option, cls=ComparisonOption, of=(Comparison.POLICIES,))


@click.command("eval", cls=SettingsCommand)
@click.argument("model", required=False)
@_against_length(
    "--context-lens",
    metavar="N,N,...",
    callback=parse_lens,
    help="Context lengths in tokens. Default: 1/2, 1, 2, 4 and 8 times the trained length; "
    "with --tasks from 1 on.",
)
@click.option(
    "--methods",
    metavar="NAME,...",
    callback=parse_methods,
    help="Methods: none, linear, ntk, dynamic, yarn, llama3, yarn+logn. Default: all of these; "
    "with --policies yarn. Position methods: dual_chunk, rerope, self_extend, string, sinks.",
)
@_against_length(
    "--rope-policies",
    metavar="NAME,...",
    callback=parse_rope_policies,
    help="Policies: fixed (one factor, the longest length's) and pinned (each length's own). "
    "Default: both.",
)
@_of_windows(
    "--windows",
    "num_windows",
    type=click.IntRange(min=0),
    metavar="N",
    callback=choose_num_windows,
    help="Spans of text whose perplexity is measured, the same at every length. 0: none. "
    "Default: 6; with --policies 32.",
)
@_of_texts(
    "--target-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Tokens of each span. Default: half of the shortest length, at most 128.",
)
@_of_texts(
    "--queries",
    "num_queries",
    type=click.IntRange(min=0),
    metavar="N",
    default=32,
    show_default=True,
    help="Questions per context length, about four in each context. The answer to each is a needle "
    "hidden in the text. 0: none.",
)
@_of_texts(
    "--forms",
    metavar="NAME,...",
    callback=parse_forms,
    help="Forms of the needles: print, assign, assert, passkey, and sentence for texts in "
    "English. Default: all but sentence.",
)
@_of_texts(
    "--depths",
    metavar="N,N,...",
    default="0,14,29,43,57,71,86,100",
    show_default=True,
    callback=parse_depths,
    help="Depths of the needles, in percent of the text; 0 is its beginning.",
)
@click.option(
    "--seed",
    type=int,
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the choice of spans, contexts and needles.",
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="Text file, or folder of text files. May be given several times. Tasks of RULER with "
    "essays read it, too. Default: sources of "
    "Python's standard library that the embedded model was not trained on.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    callback=choose_output,
    help="Folder for the numbers, the table and the plots. A run continues from the numbers of an "
    "earlier run in the folder. Default: ropewalk-eval; with --policies ropewalk-crossings.",
)
@click.option(
    "--no-resume", "resumes", flag_value=False, default=True, help="Measure everything anew."
)
@_of_texts(
    "--suggest",
    metavar="N,N,...",
    callback=parse_lens,
    help="Context lengths to suggest a deployment for. It is printed as YAML.",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    is_eager=True,  # the values of other options depend on it
    callback=parse_tasks,
    help=f"Measure tasks of RULER instead of perplexity and needles: {', '.join(TASKS)}. qa_1 "
    "needs --squad, and qa_2 needs --hotpotqa.",
)
@_of_tasks(
    "--samples",
    "num_samples",
    type=_COUNT,
    metavar="N",
    default=16,
    show_default=True,
    help="Samples of each task at each length. RULER has 500.",
)
@_of_tasks(
    "--squad",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File of SQuAD's JSON, v1.1 or v2.0: the questions and documents of qa_1.",
)
@_of_tasks(
    "--hotpotqa",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="File of HotpotQA's JSON: the questions and documents of qa_2.",
)
@click.option(
    "--policies",
    is_flag=True,
    is_eager=True,  # the values of other options depend on it
    help="Compare policies instead, for sequences that become longer than a tier while they "
    "decode: stale keys, grow, grow-exact, pinned. The options that follow need it.",
)
@_across_tiers(
    "--crossings",
    "num_crossings",
    default="1,2,3",
    show_default=True,
    metavar="N,N,...",
    callback=parse_crossings,
    help="Number of tiers that a sequence crosses.",
)
@_across_tiers(
    "--windows-together",
    type=_COUNT,
    metavar="N",
    default=16,
    show_default=True,
    help="Sequences in a batch. Times are those of a request in a batch of this size.",
)
@_across_tiers(
    "--scored-tokens",
    type=_COUNT,
    metavar="TOKENS",
    default=64,
    show_default=True,
    help="Tokens after the last crossing whose perplexity is measured.",
)
@_across_tiers(
    "--lead-tokens",
    type=_COUNT,
    metavar="TOKENS",
    default=16,
    show_default=True,
    help="Tokens decoded before the first crossing.",
)
@_across_tiers(
    "--native-len",
    type=_COUNT,
    metavar="TOKENS",
    help="Length of the first tier, at most the checkpoint's trained length. Default: the trained "
    "length.",
)
@with_flags(ModelSettings)
def evaluate(*, policies: bool, **flags: Any) -> None:
    """Measure what MODEL knows at each context length, by method and policy.

    The command measures the perplexity of the same text under more and more context. It also
    measures how many needles the model finds. A needle is a fact hidden in a long text. Both run
    through the server's own engine. With --policies, it measures sequences whose table changes
    while they decode. Without MODEL, it measures the embedded demonstration model.
    """
    if policies and flags["tasks"]:
        raise click.UsageError("--tasks has no meaning with --policies")
    log_to_stderr()
    try:
        settings = load_settings(given({name: flags[name] for name in ModelSettings.model_fields}))
        if policies:
            _compare_policies(_chosen(CrossingOptions, flags), flags["texts"], settings)
        else:
            _compare_lengths(_chosen(LengthOptions, flags), settings)
    except (EvalError, ModelError, SettingsError) as error:
        raise Refusal(str(error)) from error


def _chosen(options: type[_OptionsT], flags: Mapping[str, Any]) -> _OptionsT:
    """Return the options of one comparison; its fields have the names of the flags."""
    return options(**{each.name: flags[each.name] for each in fields(options)})


def _compare_lengths(options: LengthOptions, settings: ServeSettings) -> None:
    # Imported here, so that the other commands do not wait for the import of transformers.
    from server.evaluation.run import run_lengths, write_files  # noqa: PLC0415
    from server.evaluation.suggest import suggestion  # noqa: PLC0415
    from server.evaluation.table import table  # noqa: PLC0415

    with printed_progress() as progress:
        report = run_lengths(options, settings, progress)
    click.echo(table(report))
    write_files(report, options.output)
    _mention_missing_plots()
    if options.suggest:
        text = suggestion(report, report.model, settings.model)
        write_texts(options.output, {"suggestion.yaml": f"{text}\n"})
        click.echo(f"\n{text}")
    _tell_files(options.output)


def _compare_policies(
    options: CrossingOptions, texts: Sequence[Path], settings: ServeSettings
) -> None:
    from server.evaluation.texts import read_documents  # noqa: PLC0415
    from server.policy_eval.report import table  # noqa: PLC0415
    from server.policy_eval.run import run_crossings, write_files  # noqa: PLC0415

    with printed_progress("crossing") as progress:
        report = run_crossings(settings, options, read_documents(texts), progress)
    click.echo(table(report.outcomes))
    write_files(report, options.output)
    _mention_missing_plots()
    _tell_files(options.output)


def _tell_files(folder: Path) -> None:
    """Print the folder and the names of the files in it, on standard error like the progress."""
    names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file()))
    click.echo(f"files in {folder}: {names}", err=True)


def _mention_missing_plots() -> None:
    if not can_plot():
        click.echo(f"plots are not drawn: they need matplotlib: {INSTALL_MATPLOTLIB}", err=True)
