"""`python -m server.evaluation.crossing_command`: what stale keys cost, policy by policy."""

import sys
from pathlib import Path
from typing import Any

import click

from model_runtime.errors import ModelError
from server.setting_flags import SettingsCommand, given, with_flags
from server.setting_sections import ModelSettings
from server.settings import SettingsError, load_settings

_USAGE_ERROR = 2
_COUNT = click.IntRange(min=1)


def _numbers(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"must be numbers like 1,2,3; got {text!r}") from error


@click.command(cls=SettingsCommand)
@click.argument("model", required=False)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default="crossings",
    show_default=True,
    help="Folder for the results; what is finished there is not measured again.",
)
@click.option(
    "--methods",
    default="yarn",
    show_default=True,
    help="Of yarn, dynamic, ntk, linear, llama3. With @N behind it: a tier every N tokens beyond "
    "L, instead of doubling ones.",
)
@click.option(
    "--crossings",
    "num_crossings",
    default="1,2,3",
    show_default=True,
    callback=_numbers,
    help="How many tiers a sequence crosses.",
)
@click.option("--windows", "num_windows", type=_COUNT, default=32, show_default=True)
@click.option("--windows-together", type=_COUNT, default=16, show_default=True)
@click.option("--scored-tokens", type=_COUNT, default=64, show_default=True)
@click.option("--lead-tokens", type=_COUNT, default=16, show_default=True)
@click.option("--native-len", type=_COUNT, help="L, tokens. Left out: the checkpoint's.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--text",
    "paths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A file of text, may be repeated. Left out: held-out files of Python's library.",
)
@click.option("--no-resume", is_flag=True, help="Begin anew.")
@with_flags(ModelSettings)
def crossings(
    *,
    output: Path,
    methods: str,
    num_crossings: tuple[int, ...],
    num_windows: int,
    windows_together: int,
    scored_tokens: int,
    lead_tokens: int,
    native_len: int | None,
    seed: int,
    paths: tuple[Path, ...],
    no_resume: bool,
    **flags: Any,
) -> None:
    """Compare MODEL's answers after crossing tiers: stale keys, grow, grow-exact, pinned."""
    # Only here: transformers takes seconds.
    from server.evaluation.crossing_run import CrossingOptions, run_crossings  # noqa: PLC0415
    from server.evaluation.crossing_windows import CrossingError  # noqa: PLC0415
    from server.evaluation.held_out import Document, read_source  # noqa: PLC0415

    options = CrossingOptions(
        output=output,
        methods=tuple(methods.split(",")),
        num_crossings=num_crossings,
        num_windows=num_windows,
        windows_together=windows_together,
        scored_tokens=scored_tokens,
        lead_tokens=lead_tokens,
        native_len=native_len,
        seed=seed,
        resumes=not no_resume,
    )
    documents = [Document(str(path), read_source(path)) for path in paths]
    try:
        run_crossings(load_settings(given(flags)), options, documents or None)
    except (ModelError, SettingsError, CrossingError) as error:
        click.echo(f"ropewalk eval: {error}", err=True)
        sys.exit(_USAGE_ERROR)


if __name__ == "__main__":
    crossings()
