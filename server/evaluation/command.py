"""`ropewalk eval [MODEL]`: perplexity and retrieval, against context length or across tiers."""

import sys
from pathlib import Path
from typing import Any

import click
import structlog
from click.core import ParameterSource

from model_runtime.errors import ModelError
from server.settings.flags import SettingsCommand, given, with_flags
from server.settings.load import ServeSettings, SettingsError, load_settings
from server.settings.sections import ModelSettings

_USAGE_ERROR = 2
_COUNT = click.IntRange(min=1)
# The options of each of the two comparisons; the others belong to both.
_AGAINST_LENGTH = {
    "context_lens", "rope_policies", "target_tokens", "num_queries", "forms", "depths", "suggest",
}  # fmt: skip
_ACROSS_TIERS = {
    "num_crossings", "windows_together", "scored_tokens", "lead_tokens", "native_len",
}  # fmt: skip
_BOTH = {"methods", "num_windows", "seed", "texts", "output", "resumes"}


@click.command("eval", cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--context-lens",
    metavar="N,N,...",
    help="Context lengths in tokens. Default: L/2, L, 2L, 4L, 8L of the trained length L.",
)
@click.option(
    "--methods",
    metavar="NAME,...",
    help="Methods: none, linear, ntk, dynamic, yarn, llama3, yarn+logn. Default: all; with "
    "--policies yarn.",
)
@click.option(
    "--rope-policies",
    metavar="NAME,...",
    help="Policies: fixed (one factor, the longest length's) and pinned (each length's own). "
    "Default: both.",
)
@click.option(
    "--windows",
    "num_windows",
    type=click.IntRange(min=0),
    help="Spans of text whose perplexity is measured, the same at every length; 0: none. "
    "Default: 6; with --policies 32.",
)
@click.option(
    "--target-tokens",
    type=click.IntRange(min=1),
    help="Tokens of each span. Default: half of the shortest length, at most 128.",
)
@click.option(
    "--queries",
    "num_queries",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Questions about needles per length, about four a context; 0: none.",
)
@click.option(
    "--forms", metavar="NAME,...", help="Forms: print, assign, assert, passkey. Default: all."
)
@click.option(
    "--depths",
    metavar="N,N,...",
    default="0,14,29,43,57,71,86,100",
    show_default=True,
    help="Depths of the needles, in percent of the text; 0 is its beginning.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Chooses windows, contexts, needles."
)
@click.option(
    "--text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="Text file, or folder of such; may be given several times. Default: sources of Python's "
    "standard library that the embedded model was not trained on.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder for the numbers, the table and the plots. A run that was stopped goes on from "
    "what is there. Default: ropewalk-eval; with --policies ropewalk-crossings.",
)
@click.option(
    "--no-resume", "resumes", flag_value=False, default=True, help="Measure everything anew."
)
@click.option(
    "--suggest",
    metavar="N,N,...",
    help="Context lengths to suggest a deployment for: ends with its YAML.",
)
@click.option(
    "--policies",
    is_flag=True,
    help="Compare policies for sequences that outgrow tiers while they decode, instead: stale "
    "keys, grow, grow-exact, pinned. Those below are for this.",
)
@click.option(
    "--crossings",
    "num_crossings",
    default="1,2,3",
    show_default=True,
    metavar="N,N,...",
    help="Number of tiers that a sequence crosses.",
)
@click.option(
    "--windows-together",
    type=_COUNT,
    default=16,
    show_default=True,
    help="Sequences in a batch; times are those of a request in such company.",
)
@click.option(
    "--scored-tokens",
    type=_COUNT,
    default=64,
    show_default=True,
    help="Tokens after the last crossing whose likelihood counts.",
)
@click.option(
    "--lead-tokens",
    type=_COUNT,
    default=16,
    show_default=True,
    help="Tokens decoded before the first crossing.",
)
@click.option(
    "--native-len",
    type=_COUNT,
    help="L in tokens, at most the checkpoint's. Default: the checkpoint's.",
)
@with_flags(ModelSettings)
@click.pass_context
def evaluate(ctx: click.Context, /, *, policies: bool, **flags: Any) -> None:
    """Measure what MODEL knows at each context length, by method and policy.

    Perplexity of the same text under more and more context, and retrieval of needles hidden in it,
    through the server's own engine. With --policies: what becomes of a sequence whose table
    changes while it decodes. Without MODEL, the embedded demonstration model.
    """
    # Imported here, so that the other commands do not wait for the import of torch.
    from server.evaluation.plan import EvalError  # noqa: PLC0415
    from server.policy_eval.windows import CrossingError  # noqa: PLC0415

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    own = {name: flags.pop(name) for name in _AGAINST_LENGTH | _ACROSS_TIERS | _BOTH}
    try:
        _refuse_meaningless(ctx, policies=policies)
        settings = load_settings(given(flags))
        if policies:
            _across_tiers(own, settings)
        else:
            _against_length(own, settings)
    except (CrossingError, EvalError, ModelError, SettingsError) as error:
        for line in str(error).splitlines():
            click.echo(f"ropewalk eval: {line}", err=True)
        sys.exit(_USAGE_ERROR)


def _refuse_meaningless(ctx: click.Context, *, policies: bool) -> None:
    """Refuse options of the other comparison, because they would have no effect."""
    for param in ctx.command.params:
        others = _AGAINST_LENGTH if policies else _ACROSS_TIERS
        if param.name in others and (
            ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        ):
            without = "with" if policies else "without"
            raise click.UsageError(f"{param.opts[0]} has no meaning {without} --policies")


def _against_length(own: dict[str, Any], settings: ServeSettings) -> None:
    from server.evaluation.run import EvalOptions, run_eval  # noqa: PLC0415

    named = {name: own[name] for name in _AGAINST_LENGTH | _BOTH}
    if named["num_windows"] is None:
        named["num_windows"] = 6
    named["output"] = named["output"] or Path("ropewalk-eval")
    run_eval(EvalOptions(**named), settings)


def _across_tiers(own: dict[str, Any], settings: ServeSettings) -> None:
    from server.evaluation.plan import parse_lens  # noqa: PLC0415
    from server.evaluation.texts import read_documents  # noqa: PLC0415
    from server.policy_eval.run import CrossingOptions, run_crossings  # noqa: PLC0415

    named = {name: own[name] for name in _ACROSS_TIERS | {"seed", "resumes"}}
    named["num_crossings"] = tuple(parse_lens("--crossings", own["num_crossings"]))
    if own["methods"] is not None:
        named["methods"] = tuple(own["methods"].split(","))
    if own["num_windows"] is not None:
        named["num_windows"] = own["num_windows"]
    named["output"] = own["output"] or Path("ropewalk-crossings")
    run_crossings(settings, CrossingOptions(**named), read_documents(own["texts"]))
