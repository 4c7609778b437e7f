"""One run of the tier-change comparison: checks, missing cells and output of the numbers."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from ropewalk.model_runtime.attention.sealed.page_format import EXACT
from ropewalk.model_runtime.engine.memory.cache_size import gpu_bytes
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.held_out import Document
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.load_model import load_model
from ropewalk.server.startup.planning.planned_deployments import model_name
from ropewalk.server.startup.planning.serving_plan import step_limits
from ropewalk.studies.harness.eval_run import EvalError, RunRecord, key_of, run_study
from ropewalk.studies.harness.progress import Progress
from ropewalk.studies.policies.measure import (
    CrossingPolicy,
    Outcome,
    crossing_deployment,
    policies_of,
    run_windows,
)
from ropewalk.studies.policies.model_digest import model_digest
from ropewalk.studies.policies.options import CrossingOptions
from ropewalk.studies.policies.report import CrossingReport, Key, in_order
from ropewalk.studies.policies.windows import (
    CrossingSource,
    CrossingWindow,
    Shape,
    draw_sources,
    lay_out,
)

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

    @property
    def size(self) -> int:
        """Return 1: the progress counts cells."""
        return 1

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
    if settings.kv_cache_dtype != EXACT:
        raise EvalError(
            "kv_cache_dtype must be auto for a comparison of policies, which changes cached keys, "
            f"got {settings.kv_cache_dtype}"
        )
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
    limits = step_limits(settings, gpu_bytes(checkpoint.device))
    num_tokens = limits["max_num_batched_tokens"]
    engine = (settings.page_size, num_tokens, torch.get_num_threads())
    model = model_digest(checkpoint)

    def measure(cell: CrossingCell) -> list[Outcome]:
        outcomes = run_windows(
            checkpoint,
            cell.method,
            cell.policy,
            cell.windows,
            page_size=settings.page_size,
            max_num_batched_tokens=num_tokens,
        )
        progress.advance(1)
        return outcomes

    keyed = {key_of(cell, model, engine): cell for cell in cells}
    found: dict[Key, list[Outcome]] = defaultdict(list)
    for cell, outcomes in zip(cells, run_study(keyed, measure, record, progress), strict=True):
        found[cell.method, cell.num_crossings, cell.policy] += outcomes
    return CrossingReport(model_name(settings), longest.native_len, options, in_order(found))


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
