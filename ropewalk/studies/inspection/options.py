"""The options of `ropewalk inspect` that are not settings."""

from dataclasses import dataclass
from pathlib import Path

import click

from ropewalk.studies.harness.options import FILE, option
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
