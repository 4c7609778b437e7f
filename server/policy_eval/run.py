"""One run of the tier-change comparison: checks, missing cells and output of the numbers."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from model_runtime.loading.checkpoint import Checkpoint
from server.corpus.held_out import Document
from server.policy_eval.measure import (
    METHODS,
    Outcome,
    crossing_deployment,
    policies_of,
    run_windows,
)
from server.policy_eval.plot import can_plot, plot
from server.policy_eval.record import Cell, Record, fingerprint, key_of
from server.policy_eval.report import (
    Key,
    Outcomes,
    as_csv,
    as_json,
    differences_of,
    in_order,
    rows_of,
    table,
)
from server.policy_eval.windows import CrossingError, Shape, Source, draw_sources, lay_out
from server.settings.load import ServeSettings
from server.startup.load_model import load_model
from server.startup.serving_plan import EMBEDDED_NAME

MOST_CROSSINGS = 6  # 64 times L


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingOptions:
    """The options of a comparison; lengths are in tokens."""

    output: Path  # a folder
    methods: tuple[str, ...] = ("yarn",)  # `yarn@8`: a tier every 8 tokens instead of doubling
    num_crossings: tuple[int, ...] = (1, 2, 3)
    num_windows: int = 32
    windows_together: int = 16  # in one batch; times are those of a request in this batch
    scored_tokens: int = 64  # after the last tier change
    lead_tokens: int = 16  # decoded before the first
    native_len: int | None = None  # L; None: the checkpoint's
    seed: int = 0  # of texts and needles
    resumes: bool = True


def run_crossings(
    settings: ServeSettings,
    options: CrossingOptions,
    documents: Sequence[Document],
) -> Outcomes:
    """Measure missing cells, write table, JSON, CSV and plot to the folder, print the table.

    Raises CrossingError if the comparison is impossible, ModelError if loading fails.
    """
    check_options(options)
    record = Record(options.output, resumes=options.resumes)
    checkpoint = load_model(settings)
    shapes = shapes_of(checkpoint, options)
    for method in options.methods:  # a checkpoint's errors are reported before any run
        shape = shapes[-1]
        crossing_deployment(checkpoint.native, method, "grow", shape, shape.final_ceiling)
    sources = draw_sources(
        checkpoint.tokenizer, documents, shapes[-1], options.num_windows, options.seed
    )
    outcomes = _measured(checkpoint, settings, options, sources, record)
    name = EMBEDDED_NAME if settings.model is None else Path(settings.model).name
    asked = {"model": name, **asdict(options), "native_len": shapes[-1].native_len}
    asked["output"] = str(options.output)
    _write(outcomes, asked, options.output)
    click.echo(table(outcomes))
    return outcomes


def check_options(options: CrossingOptions) -> None:
    """Check the options that need no model. Raises CrossingError."""
    for method in options.methods:
        name, at, step = method.partition("@")
        if name not in METHODS:
            raise CrossingError(f"methods must be of {', '.join(METHODS)}; got {method!r}")
        if at and not (step.isascii() and step.isdigit() and int(step)):
            raise CrossingError(
                f"methods: behind @ stands a whole number of tokens from 1, got {method!r}"
            )
    for number in options.num_crossings:
        if not 1 <= number <= MOST_CROSSINGS:
            raise CrossingError(f"crossings must be from 1 to {MOST_CROSSINGS}, got {number}")
    if not options.methods or not options.num_crossings:
        raise CrossingError("methods and crossings must each name at least one")
    for name in ("num_windows", "windows_together", "scored_tokens", "lead_tokens"):
        value = getattr(options, name)
        if value < 1:
            raise CrossingError(f"{name} must be at least 1, got {value}")


def shapes_of(checkpoint: Checkpoint, options: CrossingOptions) -> list[Shape]:
    """Return a shape per number of tier changes, shortest first. Raises CrossingError."""
    known = checkpoint.native.native_len
    native_len = options.native_len or known
    if not options.lead_tokens < native_len <= known:
        raise CrossingError(
            f"native_len must be more than lead_tokens ({options.lead_tokens}) and at most what "
            f"the checkpoint was trained for ({known}), got {native_len}"
        )
    return [
        Shape(native_len, number, options.lead_tokens, options.scored_tokens)
        for number in sorted(set(options.num_crossings))
    ]


def _measured(
    checkpoint: Checkpoint,
    settings: ServeSettings,
    options: CrossingOptions,
    sources: Sequence[Source],
    record: Record,
) -> Outcomes:
    """Measure cell by cell, all policies of a group before the next group."""
    shapes = shapes_of(checkpoint, options)
    model = fingerprint(checkpoint)
    engine = f"{settings.page_size} {settings.max_num_batched_tokens} {torch.get_num_threads()}"
    found: dict[Key, list[Outcome]] = defaultdict(list)
    starts = range(0, len(sources), options.windows_together)
    methods = tuple(dict.fromkeys(options.methods))
    num_cells = len(starts) * len(shapes) * sum(len(policies_of(each)) for each in methods)
    with _progress(num_cells) as done:
        for group, start in enumerate(starts):
            own = sources[start : start + options.windows_together]
            for shape in shapes:
                windows = [lay_out(checkpoint.tokenizer, source, shape) for source in own]
                for method in methods:
                    for policy in policies_of(method):
                        cell = Cell(method, policy, shape.num_crossings, group)
                        key = key_of(cell, windows, model, engine)
                        outcomes = record.get(key)
                        if outcomes is None:
                            outcomes = run_windows(
                                checkpoint,
                                method,
                                policy,
                                windows,
                                page_size=settings.page_size,
                                max_num_batched_tokens=settings.max_num_batched_tokens,
                            )
                            record.add(key, cell, outcomes)
                        found[method, shape.num_crossings, policy] += outcomes
                        done(cell)
    return in_order(found)


@contextmanager
def _progress(num_cells: int) -> Iterator[Callable[[Cell], None]]:
    """Show a bar on a terminal, otherwise a line per cell, on standard error."""
    if sys.stderr.isatty():
        with click.progressbar(length=num_cells, label="crossing", file=sys.stderr) as bar:
            yield lambda _: bar.update(1)
        return
    num_done = 0

    def say(cell: Cell) -> None:
        nonlocal num_done
        num_done += 1
        click.echo(f"{num_done} of {num_cells}: {cell.label}", err=True)

    yield say


def _write(outcomes: Outcomes, asked: dict[str, object], folder: Path) -> None:
    texts = {
        "crossings.json": json.dumps(as_json(outcomes, asked), indent=1) + "\n",
        "crossings.csv": as_csv(rows_of(outcomes)),
        "crossings_differences.csv": as_csv(differences_of(outcomes)),
        "crossings.txt": table(outcomes) + "\n",
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if can_plot():
            native_len, model = int(str(asked["native_len"])), str(asked["model"])
            plot(outcomes, native_len, model, folder / "crossings.png")
        else:
            click.echo(
                "crossings.png is not drawn: it needs matplotlib, the extra `plot`", err=True
            )
    except OSError as error:
        raise CrossingError(f"output: cannot write {error.filename}: {error.strerror}") from error
