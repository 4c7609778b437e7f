"""One run of `ropewalk eval`: checks, measurement and output of the numbers."""

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from model_runtime.engine.engine import Engine
from rope import NativeRope
from server.evaluation.cells import PERPLEXITY, RETRIEVAL, Grid, make_grid, measure
from server.evaluation.haystack import choose_haystacks
from server.evaluation.plan import (
    UNSCALED,
    EvalError,
    EvalPlan,
    choose_context_lens,
    choose_target_tokens,
    choose_variants,
    parse_depths,
    parse_forms,
    parse_lens,
)
from server.evaluation.plot import can_plot, plot
from server.evaluation.progress import progress
from server.evaluation.record import FILE as RECORD_FILE
from server.evaluation.record import Record
from server.evaluation.report import Report, Row, as_csv, as_json, make_row
from server.evaluation.subject import Subject, load_subject, native_of
from server.evaluation.suggest import suggestion
from server.evaluation.table import table
from server.evaluation.texts import Texts, choose_windows, make_texts, read_documents
from server.settings.load import ServeSettings


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The command line options, described in `server/evaluation/command.py`."""

    context_lens: str | None
    methods: str | None
    rope_policies: str | None
    num_windows: int
    target_tokens: int | None
    num_queries: int
    forms: str | None
    depths: str
    seed: int
    texts: tuple[Path, ...]
    output: Path
    resumes: bool
    suggest: str | None


def run_eval(options: EvalOptions, settings: ServeSettings) -> None:
    """Measure, print the table, write the files. Raises EvalError, ModelError, SettingsError."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    # Checked first: without lengths, it takes the next flag as its value. That flag's value then
    # becomes the model.
    parse_lens("--suggest", options.suggest)
    plan = make_plan(options, native_of(settings))
    documents = read_documents(options.texts)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        record = Record(options.output, resumes=options.resumes)
        subject = load_subject(settings, plan)
        texts = make_texts(documents, subject.tokenizer, plan.longest)
        grid = make_grid(
            plan=plan,
            deployments=subject.deployments,
            texts=texts,
            windows=choose_windows(texts, plan, subject.tokenizer),
            haystacks=choose_haystacks(texts, plan, subject.tokenizer),
            tokenizer=subject.tokenizer,
        )
        subject.engine.start()
        try:
            _measure_missing(subject.engine, grid, record, subject.digest)
        finally:
            subject.engine.stop()
        report = Report(
            model=subject.name,
            model_digest=subject.digest,
            dtype=subject.dtype,
            device=subject.device,
            text=_text_in_words(options, texts),
            text_tokens=texts.num_tokens,
            started_at=started_at,
            plan=plan,
            rows=_rows(plan, subject, grid, record),
        )
        click.echo(table(report))
        _write_files(report, options.output)
    except OSError as error:
        raise EvalError(
            f"--output: cannot write {error.filename or options.output}: {error.strerror}"
        ) from error
    if plan.suggested_lens:
        text = suggestion(report, subject.name, settings.model)
        (options.output / "suggestion.yaml").write_text(text + "\n", encoding="utf-8")
        click.echo(f"\n{text}")


def make_plan(options: EvalOptions, native: NativeRope) -> EvalPlan:
    """Check the options against each other and the model's length. Raises EvalError."""
    if options.num_windows == options.num_queries == 0:
        raise EvalError("--windows and --queries must not both be 0: nothing would be measured")
    suggested = sorted(set(parse_lens("--suggest", options.suggest)))
    lens = choose_context_lens(options.context_lens, native, suggested)
    variants = choose_variants(options.methods, options.rope_policies)
    if native.carries_scaling:
        if any(each.method != UNSCALED for each in variants):
            raise EvalError(
                f"--methods must be {UNSCALED}: the checkpoint was trained with "
                f"{native.method.scaling.rope_type}, and rescaling that by length is not supported "
                f"yet; got {options.methods or 'all'}"
            )
        if lens[-1] > native.native_len:
            raise EvalError(
                f"--context-lens must be <= {native.native_len} (the checkpoint's own length), got "
                f"{lens[-1]}"
            )
    return EvalPlan(
        native_len=native.native_len,
        carries_scaling=native.carries_scaling,
        context_lens=lens,
        variants=variants,
        num_windows=options.num_windows,
        target_tokens=choose_target_tokens(options.target_tokens, lens[0]),
        num_queries=options.num_queries,
        forms=parse_forms(options.forms),
        depths=parse_depths(options.depths),
        seed=options.seed,
        suggested_lens=tuple(suggested),
    )


def _measure_missing(engine: Engine, grid: Grid, record: Record, digest: str) -> None:
    """Measure missing cells in the grid's order, and save each one as soon as it is finished."""
    missing = [cell for cell in grid.cells if record.get(cell.key(digest)) is None]
    num_found = len(grid.cells) - len(missing)
    if num_found:
        click.echo(f"{num_found} of {len(grid.cells)} cells are in {RECORD_FILE}", err=True)
    with progress(missing) as telling:
        for cell in missing:
            began = time.monotonic()
            scores = measure(engine, cell, telling.on_tokens(cell))
            seconds = time.monotonic() - began
            record.add(cell.key(digest), cell, scores, seconds)
            telling.finished(cell, seconds)


def _rows(plan: EvalPlan, subject: Subject, grid: Grid, record: Record) -> tuple[Row, ...]:
    rows = []
    for variant in plan.variants:
        for context_len in plan.context_lens:
            cells = {
                kind: grid.of_variant[variant, kind, context_len]
                for kind in (PERPLEXITY, RETRIEVAL)
                if (variant, kind, context_len) in grid.of_variant
            }
            scores = {
                kind: record.get(cell.key(subject.digest)) or [] for kind, cell in cells.items()
            }
            factor = next(iter(cells.values())).placement.tier.factor
            rows.append(make_row(variant, context_len, factor, scores))
    return tuple(rows)


def _write_files(report: Report, folder: Path) -> None:
    text = json.dumps(as_json(report), indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    (folder / "results.csv").write_text(as_csv(report), encoding="utf-8")
    (folder / "table.txt").write_text(table(report) + "\n", encoding="utf-8")
    if can_plot():
        plot(report, folder)
    else:
        click.echo("plots are not drawn: they need pip install 'ropewalk[plot]'", err=True)


def _text_in_words(options: EvalOptions, texts: Texts) -> str:
    named = ", ".join(map(str, options.texts))
    where = named or "held-out sources of Python's standard library"
    joined = ", joined" if texts.is_joined else ""
    return f"{where} ({texts.num_tokens} tokens{joined})"
