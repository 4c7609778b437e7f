"""One run of the tier-change comparison: checks, missing cells and output of the numbers."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.text.tokenizer import Tokenizer
from server.corpus.held_out import Document
from server.policy_eval.measure import (
    CrossingPolicy,
    Outcome,
    crossing_deployment,
    policies_of,
    run_windows,
)
from server.policy_eval.model_digest import model_digest
from server.policy_eval.options import CrossingOptions
from server.policy_eval.plot import plot
from server.policy_eval.report import (
    CrossingReport,
    Key,
    as_json,
    differences_of,
    flat,
    in_order,
    rows_of,
    table,
)
from server.policy_eval.windows import CrossingSource, CrossingWindow, Shape, draw_sources, lay_out
from server.settings.load import ServeSettings
from server.startup.load_model import load_model
from server.startup.serving_plan import model_name
from server.study.eval_run import EvalError, RunRecord, csv_text, key_of, write_texts, writing
from server.study.plotting import can_plot
from server.study.progress import Progress

RECORD_FILE = "crossings.jsonl"


@dataclass(frozen=True, slots=True)
class CrossingCell:
    """Some windows under one policy, which are measured together."""

    method: str
    policy: CrossingPolicy
    num_crossings: int
    group: int  # which windows, counted from 0
    windows: tuple[CrossingWindow, ...]

    @property
    def label(self) -> str:
        """Return a label, for example `yarn stale, crossings: 1, group 0`."""
        return f"{self.method} {self.policy}, crossings: {self.num_crossings}, group {self.group}"

    def in_words(self) -> dict[str, Any]:
        names = ("method", "policy", "num_crossings", "group")
        return {name: getattr(self, name) for name in names}


def run_crossings(
    settings: ServeSettings,
    options: CrossingOptions,
    documents: Sequence[Document],
    progress: Progress,
) -> CrossingReport:
    """Measure the missing cells.

    Raises EvalError if the comparison is impossible, ModelError if loading fails.
    """
    adapter = TypeAdapter(list[Outcome])
    record = RunRecord(options.output / RECORD_FILE, adapter, resumes=options.resumes)
    checkpoint = load_model(settings)
    shapes = shapes_of(checkpoint, options)
    longest = shapes[-1]
    for method in options.methods:  # a checkpoint's errors are reported before any run
        crossing_deployment(checkpoint.native, method, "grow", longest, longest.final_ceiling)
    sources = draw_sources(
        checkpoint.tokenizer, documents, longest, options.num_windows, options.seed
    )
    cells = _cells(options, shapes, sources, checkpoint.tokenizer)
    # With the model's digest, everything beside the cell that affects an outcome.
    engine = (settings.page_size, settings.max_num_batched_tokens, torch.get_num_threads())
    model = model_digest(checkpoint)
    found: dict[Key, list[Outcome]] = defaultdict(list)
    progress.begin(len(cells))
    for number, cell in enumerate(cells, start=1):
        key = key_of(cell, model, engine)
        outcomes = record.get(key)
        if outcomes is None:
            outcomes = run_windows(
                checkpoint,
                cell.method,
                cell.policy,
                cell.windows,
                page_size=settings.page_size,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            )
            record.add(key, cell.in_words(), outcomes)
        found[cell.method, cell.num_crossings, cell.policy] += outcomes
        progress.advance(1)
        progress.log(f"{number} of {len(cells)}: {cell.label}")
    return CrossingReport(model_name(settings), longest.native_len, options, in_order(found))


def write_files(report: CrossingReport, folder: Path) -> None:
    """Write table, JSON, CSV and plot to the folder. Raises EvalError."""
    outcomes = report.outcomes
    texts = {
        "crossings.json": json.dumps(as_json(report), indent=1) + "\n",
        "crossings.csv": csv_text([flat(each) for each in rows_of(outcomes)]),
        "crossings_differences.csv": csv_text([flat(each) for each in differences_of(outcomes)]),
        "crossings.txt": table(outcomes) + "\n",
    }
    write_texts(folder, texts)
    if can_plot():
        with writing(folder):
            plot(report, folder / "crossings.png")


def shapes_of(checkpoint: Checkpoint, options: CrossingOptions) -> list[Shape]:
    """Return a shape per number of tier changes, shortest first. Raises EvalError."""
    known = checkpoint.native.native_len
    native_len = options.native_len or known
    if not options.lead_tokens < native_len <= known:
        raise EvalError(
            f"--native-len must be more than --lead-tokens ({options.lead_tokens}) and at most "
            f"what the checkpoint was trained for ({known}), got {native_len}"
        )
    return [
        Shape(native_len, number, options.lead_tokens, options.scored_tokens)
        for number in options.num_crossings
    ]


def _cells(
    options: CrossingOptions,
    shapes: Sequence[Shape],
    sources: Sequence[CrossingSource],
    tokenizer: Tokenizer,
) -> list[CrossingCell]:
    """Return the cells, all policies of a group before the next group. Raises EvalError."""
    cells = []
    for group, start in enumerate(range(0, len(sources), options.windows_together)):
        own = sources[start : start + options.windows_together]
        for shape in shapes:
            windows = tuple(lay_out(tokenizer, source, shape) for source in own)
            cells += [
                CrossingCell(method, policy, shape.num_crossings, group, windows)
                for method in options.methods
                for policy in policies_of(method)
            ]
    return cells
