"""`ropewalk eval [MODEL]`: perplexity and retrieval against context length."""

import sys
from pathlib import Path
from typing import Any

import click
import structlog

from model_runtime.errors import ModelError
from server.setting_flags import SettingsCommand, given, with_flags
from server.setting_sections import ModelSettings
from server.settings import SettingsError, load_settings

_USAGE_ERROR = 2
_OWN = {
    "context_lens", "methods", "rope_policies", "num_windows", "target_tokens", "num_queries",
    "forms", "depths", "seed", "texts", "output", "resumes", "suggest",
}  # fmt: skip


@click.command("eval", cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--context-lens",
    metavar="N,N,...",
    help="Context lengths in tokens. Left out: L/2, L, 2L, 4L, 8L of the trained length L.",
)
@click.option(
    "--methods",
    metavar="NAME,...",
    help="Of none, linear, ntk, dynamic, yarn, llama3, yarn+logn. Left out: all.",
)
@click.option(
    "--rope-policies",
    metavar="NAME,...",
    help="Of fixed (the longest length's factor at every length) and pinned (each length's own). "
    "Left out: both.",
)
@click.option(
    "--windows",
    "num_windows",
    type=click.IntRange(min=0),
    default=6,
    show_default=True,
    help="Spans of text whose perplexity is measured, the same at every length; 0: none.",
)
@click.option(
    "--target-tokens",
    type=click.IntRange(min=1),
    help="Tokens of each of them. Left out: half of the shortest length, at most 128.",
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
    "--forms", metavar="NAME,...", help="Of print, assign, assert, passkey. Left out: all."
)
@click.option(
    "--depths",
    metavar="N,N,...",
    default="0,14,29,43,57,71,86,100",
    show_default=True,
    help="Where needles are hidden, in percent of the text; 0 is its beginning.",
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
    help="Text file, or folder of such; may be given several times. Left out: sources of Python's "
    "standard library that the embedded model was not trained on.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="ropewalk-eval",
    show_default=True,
    metavar="DIR",
    help="Folder for results.jsonl, results.json, results.csv, table.txt and plots. A run that was "
    "stopped goes on from results.jsonl.",
)
@click.option(
    "--no-resume", "resumes", flag_value=False, default=True, help="Measure everything anew."
)
@click.option(
    "--suggest",
    metavar="N,N,...",
    help="Context lengths to suggest a deployment for: ends with its YAML.",
)
@with_flags(ModelSettings)
def evaluate(**flags: Any) -> None:
    """Measure what MODEL knows at each context length, by method and policy.

    Perplexity of the same text under more and more context, and retrieval of needles hidden in it,
    through the server's own engine. Without MODEL, the embedded demonstration model.
    """
    # Only here, so that the other commands do not wait for torch to be imported.
    from server.evaluation.plan import EvalError  # noqa: PLC0415
    from server.evaluation.run import EvalOptions, run_eval  # noqa: PLC0415

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    options = {name: flags.pop(name) for name in _OWN}
    try:
        run_eval(EvalOptions(**options), load_settings(given(flags)))
    except (EvalError, ModelError, SettingsError) as error:
        for line in str(error).splitlines():
            click.echo(f"ropewalk eval: {line}", err=True)
        sys.exit(_USAGE_ERROR)
