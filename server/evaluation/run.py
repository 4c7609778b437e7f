"""One run of `ropewalk eval`: checks, measurement and output of the numbers."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from model_runtime.engine.engine import Engine
from server.evaluation.cells import (
    PERPLEXITY,
    RETRIEVAL,
    Grid,
    LengthCell,
    Score,
    make_grid,
    measure,
)
from server.evaluation.haystack import choose_haystacks
from server.evaluation.plan import LengthOptions, LengthPlan, make_plan
from server.evaluation.plot import plot
from server.evaluation.predictions import pair_up, write_predictions
from server.evaluation.report import LengthReport, LengthRow, as_csv, as_json, make_row
from server.evaluation.static_plot import plot_static
from server.evaluation.subject import Subject, load_subject, native_of
from server.evaluation.table import table
from server.evaluation.tasks.qa import QuestionSet
from server.evaluation.tasks.qa_files import read_question_sets
from server.evaluation.texts import (
    Texts,
    choose_windows,
    make_task_texts,
    make_texts,
    read_documents,
)
from server.settings.load import ServeSettings
from server.study.eval_run import RunRecord, write_texts, writing
from server.study.plotting import can_plot
from server.study.progress import Progress

_RECORD_FILE = "results.jsonl"


def run_lengths(
    options: LengthOptions, settings: ServeSettings, progress: Progress
) -> LengthReport:
    """Measure the missing cells. Raises EvalError, ModelError, SettingsError."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    plan = make_plan(options, native_of(settings))
    documents = read_documents(options.texts)
    question_sets = read_question_sets(options.qa_paths, plan.num_samples)
    scores = TypeAdapter(list[Score])
    record = RunRecord(options.output / _RECORD_FILE, scores, resumes=options.resumes)
    subject = load_subject(settings, plan)
    if plan.tasks:
        texts = make_task_texts(documents, subject.tokenizer, plan.tasks)
    else:
        texts = make_texts(documents, subject.tokenizer, plan.longest)
    grid = make_grid(
        plan=plan,
        deployments=subject.deployments,
        texts=texts,
        windows=choose_windows(texts, plan, subject.tokenizer),
        haystacks=choose_haystacks(texts, plan, subject.tokenizer),
        question_sets=question_sets,
        tokenizer=subject.tokenizer,
    )
    # Not before: a text that is too short is refused without the seconds that a large cache takes.
    engine = subject.make_engine()
    engine.start()
    try:
        _measure_missing(subject, engine, grid, record, progress)
    finally:
        engine.stop()
    return LengthReport(
        model=subject.name,
        model_digest=subject.digest,
        dtype=subject.dtype,
        device=subject.device,
        text=_text_in_words(options, texts, question_sets),
        text_tokens=texts.num_tokens,
        started_at=started_at,
        plan=plan,
        rows=_rows(plan, subject, grid, record),
    )


def write_files(report: LengthReport, folder: Path) -> None:
    """Write JSON, CSV, table and plots to the folder. Raises EvalError."""
    texts = {
        "results.json": json.dumps(as_json(report), indent=1) + "\n",
        "results.csv": as_csv(report),
        "table.txt": table(report) + "\n",
    }
    write_texts(folder, texts)
    if report.plan.tasks:
        write_predictions(report, folder / "ruler")
    if can_plot():
        with writing(folder):
            plot(report, folder)
            plot_static(report, folder)


def _measure_missing(
    subject: Subject, engine: Engine, grid: Grid, record: RunRecord[Score], progress: Progress
) -> None:
    """Measure missing cells in the grid's order, and save each one as soon as it is finished."""
    missing = [cell for cell in grid.cells if record.get(cell.key(subject.digest)) is None]
    num_found = len(grid.cells) - len(missing)
    if num_found:
        progress.log(
            f"{num_found} of {len(grid.cells)} cells are those of {_RECORD_FILE} and are not "
            "measured again (--no-resume measures them)"
        )
    progress.begin(sum(cell.num_tokens for cell in missing))
    for number, cell in enumerate(missing, start=1):
        began = time.monotonic()
        scores = measure(engine, cell, progress)
        seconds = time.monotonic() - began
        record.add(cell.key(subject.digest), _in_words(cell, seconds), scores)
        progress.log(f"{number} of {len(missing)}: {cell.label}, {seconds:.1f} s")


def _in_words(cell: LengthCell, seconds: float) -> dict[str, object]:
    """Return what a reader of the record wants to know about a cell."""
    return {
        "kind": cell.kind,
        "context_len": cell.context_len,
        "profile": repr(cell.placement.tier.profile),
        "seconds": round(seconds, 3),
    }


def _rows(
    plan: LengthPlan, subject: Subject, grid: Grid, record: RunRecord[Score]
) -> tuple[LengthRow, ...]:
    rows = []
    for variant in plan.variants:
        for context_len in plan.context_lens:
            cells = {
                kind: grid.of_variant[variant, kind, context_len]
                for kind in (PERPLEXITY, RETRIEVAL, *plan.tasks)
                if (variant, kind, context_len) in grid.of_variant
            }
            scores = {
                kind: record.get(cell.key(subject.digest)) or [] for kind, cell in cells.items()
            }
            factor = next(iter(cells.values())).placement.tier.factor
            answered = {task: pair_up(cells[task], scores.pop(task)) for task in plan.tasks}
            rows.append(make_row(variant, context_len, factor, scores, answered))
    return tuple(rows)


def _text_in_words(
    options: LengthOptions, texts: Texts, question_sets: Mapping[str, QuestionSet]
) -> str:
    files = [
        f"{each.path} ({len(each.questions)} questions, {len(each.documents)} documents)"
        for each in question_sets.values()
    ]
    if texts.sources:
        files.insert(0, _sources_in_words(options, texts))
    elif len(question_sets) < len(options.tasks):
        files.insert(0, "generated")
    return "; ".join(files)


def _sources_in_words(options: LengthOptions, texts: Texts) -> str:
    named = ", ".join(map(str, options.texts))
    where = named or "held-out sources of Python's standard library"
    joined = ", joined" if texts.is_joined else ""
    return f"{where} ({texts.num_tokens} tokens{joined})"
