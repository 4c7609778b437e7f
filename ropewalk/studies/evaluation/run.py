"""One run of `ropewalk eval`: checks, measurement and output of the numbers."""

import itertools
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.haystack import ChatFrame
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.planning.template_of import chat_template_of
from ropewalk.studies.evaluation.cells import At, Grid, LengthCell, Score, make_grid, measure
from ropewalk.studies.evaluation.plan import EvalError, LengthOptions, LengthPlan, make_plan
from ropewalk.studies.evaluation.record import RunRecord
from ropewalk.studies.evaluation.report import LengthReport, LengthRow
from ropewalk.studies.evaluation.subject import load_subject, native_of
from ropewalk.studies.evaluation.texts import (
    Texts,
    choose_haystacks,
    choose_texts,
    choose_windows,
    make_texts,
    read_documents,
)
from ropewalk.studies.harness.progress import Progress


def run_lengths(
    options: LengthOptions, settings: ServeSettings, progress: Progress
) -> LengthReport:
    """Measure the missing cells. Raises EvalError, ModelError, SettingsError."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    plan = make_plan(options, native_of(settings))
    documents = read_documents(options.texts)
    record = RunRecord(options.output / "results.jsonl", resumes=options.resumes)
    subject = load_subject(settings, plan)
    texts = make_texts(documents, subject.tokenizer, plan.longest)
    grid = make_grid(
        plan=plan,
        deployments=subject.deployments,
        texts=texts,
        windows=[] if plan.prefixes else choose_windows(texts, plan, subject.tokenizer),
        sources=choose_texts(texts, plan) if plan.prefixes else [],
        haystacks=choose_haystacks(texts, plan, subject.tokenizer),
        tokenizer=subject.tokenizer,
        chat=_chat_frame(settings, subject.tokenizer) if plan.chat else None,
    )
    # Not before: a text that is too short is refused without the seconds that a large cache takes.
    engine = subject.make_engine()
    engine.start()
    try:
        scores = _measured(grid.cells, subject.digest, engine, record, progress)
    finally:
        engine.stop()
    return LengthReport(
        model=subject.name,
        model_digest=subject.digest,
        dtype=subject.dtype,
        device=subject.device,
        text=_text_in_words(options, texts),
        text_tokens=texts.num_tokens,
        started_at=started_at,
        plan=plan,
        rows=_rows(plan, grid, scores),
        kv_cache_dtype=subject.kv_cache_dtype,
    )


def _measured(
    cells: Mapping[At, LengthCell],
    model_digest: str,
    engine: Engine,
    record: RunRecord,
    progress: Progress,
) -> dict[At, list[Score]]:
    """Measure the cells that the record lacks; return the scores of all.

    Each one is saved as soon as it is finished.
    """
    keys = {at: cell.key(model_digest) for at, cell in cells.items()}
    missing = [at for at, key in keys.items() if record.get(key) is None]
    if len(missing) < len(cells):
        progress.log(
            f"{len(cells) - len(missing)} of {len(cells)} cells are those of {record.path.name} "
            "and are not measured again (--no-resume measures them)"
        )
    progress.begin(sum(cells[at].size for at in missing))
    for number, at in enumerate(missing, start=1):
        cell, began = cells[at], time.monotonic()
        scores = measure(engine, cell, progress)
        seconds = time.monotonic() - began
        record.add(keys[at], {**cell.in_words(), "seconds": round(seconds, 3)}, scores)
        progress.log(f"{number} of {len(missing)}: {cell.label}, {seconds:.1f} s")
    return {at: record.get(key) or [] for at, key in keys.items()}


def _chat_frame(settings: ServeSettings, tokenizer: Tokenizer) -> ChatFrame:
    """Return the template's text around a user's message. Raises EvalError, ModelError."""
    template = chat_template_of(settings, tokenizer.own_templates, tokenizer.special_tokens_map)
    message = "the message"
    text = template.render([{"role": "user", "content": message}])
    before, found, after = text.partition(message)
    if not found:
        raise EvalError("--chat: the chat template does not write a user's message as it is")
    return ChatFrame(before, after)


def _rows(plan: LengthPlan, grid: Grid, scores: Mapping[At, list[Score]]) -> tuple[LengthRow, ...]:
    rows = []
    for variant, context_len in itertools.product(plan.variants, plan.context_lens):
        of_kind = grid.of_variant[variant, context_len]
        tier_choice = grid.cells[next(iter(of_kind.values()))].tier_choice
        factor = tier_choice.tier_covering(context_len).factor
        own = {
            kind: grid.cells[at].at_length(context_len, scores[at]) for kind, at in of_kind.items()
        }
        rows.append(LengthRow(variant, context_len, factor, own))
    return tuple(rows)


def _text_in_words(options: LengthOptions, texts: Texts) -> str:
    where = ", ".join(map(str, options.texts)) or "held-out sources of Python's standard library"
    joined = ", joined" if texts.is_joined else ""
    return f"{where} ({texts.num_tokens} tokens{joined})"
