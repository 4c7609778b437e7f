"""One run of `ropewalk eval lengths` or `ruler`: checks, measurement and output of the numbers."""

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from pydantic import TypeAdapter

from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.haystack import ChatFrame
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.planning.template_of import chat_template_of
from ropewalk.studies.evaluation.cells import Grid, LengthCell, Score, make_grid, measure
from ropewalk.studies.evaluation.plan import LengthOptions, LengthPlan, make_plan
from ropewalk.studies.evaluation.report import Answered, LengthReport, LengthRow
from ropewalk.studies.evaluation.subject import load_subject, native_of
from ropewalk.studies.evaluation.texts import (
    Texts,
    choose_haystacks,
    choose_texts,
    choose_windows,
    make_task_texts,
    make_texts,
    read_documents,
)
from ropewalk.studies.harness.eval_run import EvalError, RunRecord, run_study
from ropewalk.studies.harness.progress import Progress
from ropewalk.studies.ruler.qa import QuestionSet
from ropewalk.studies.ruler.qa_files import read_question_sets
from ropewalk.studies.ruler.sample import Sample, SampleScore


def run_lengths(
    options: LengthOptions, settings: ServeSettings, progress: Progress
) -> LengthReport:
    """Measure the missing cells. Raises EvalError, ModelError, SettingsError."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    plan = make_plan(options, native_of(settings))
    documents = read_documents(options.texts)
    question_sets = read_question_sets(options.qa_paths, plan.num_samples)
    record = RunRecord(
        options.output / "results.jsonl", TypeAdapter(list[Score]), resumes=options.resumes
    )
    subject = load_subject(settings, plan)
    if plan.tasks:
        texts = make_task_texts(documents, subject.tokenizer, plan.tasks)
    else:
        texts = make_texts(documents, subject.tokenizer, plan.longest)
    grid = make_grid(
        plan=plan,
        deployments=subject.deployments,
        texts=texts,
        windows=[] if plan.prefixes else choose_windows(texts, plan, subject.tokenizer),
        sources=choose_texts(texts, plan) if plan.prefixes else [],
        haystacks=choose_haystacks(texts, plan, subject.tokenizer),
        question_sets=question_sets,
        tokenizer=subject.tokenizer,
        chat=_chat_frame(settings, subject.tokenizer) if plan.chat else None,
    )
    # Not before: a text that is too short is refused without the seconds that a large cache takes.
    engine = subject.make_engine()
    engine.start()
    try:
        scores = run_study(
            {cell.key(subject.digest): cell for cell in grid.cells.values()},
            partial(measure, engine, progress=progress),
            *(record, progress),
        )
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
        rows=_rows(plan, grid, dict(zip(grid.cells, scores, strict=True))),
        kv_cache_dtype=subject.kv_cache_dtype,
    )


def _chat_frame(settings: ServeSettings, tokenizer: Tokenizer) -> ChatFrame:
    """Return the template's text around a user's message. Raises EvalError, ModelError."""
    template = chat_template_of(settings, tokenizer.own_templates, tokenizer.special_tokens_map)
    message = "the message"
    text = template.render([{"role": "user", "content": message}])
    before, found, after = text.partition(message)
    if not found:
        raise EvalError("--chat: the chat template does not write a user's message as it is")
    return ChatFrame(before, after)


def _rows(
    plan: LengthPlan, grid: Grid, scores: Mapping[object, list[Score]]
) -> tuple[LengthRow, ...]:
    rows = []
    for variant, context_len in itertools.product(plan.variants, plan.context_lens):
        of_kind = grid.of_variant[variant, context_len]
        tier_choice = grid.cells[next(iter(of_kind.values()))].tier_choice
        factor = tier_choice.tier_covering(context_len).factor
        answered = {
            task: _pair_up(grid.cells[of_kind[task]], scores[of_kind[task]]) for task in plan.tasks
        }
        own = {
            kind: grid.cells[at].at_length(context_len, scores[at]) for kind, at in of_kind.items()
        }
        rows.append(LengthRow(variant, context_len, factor, own, answered))
    return tuple(rows)


def _pair_up(cell: LengthCell, scores: list[Score]) -> list[Answered]:
    """Return the samples of a task's cell with their scores."""
    return [
        Answered(task.of, score)
        for task, score in zip(cell.tasks, scores, strict=True)
        if isinstance(task.of, Sample) and isinstance(score, SampleScore)
    ]


def _text_in_words(
    options: LengthOptions, texts: Texts, question_sets: Mapping[str, QuestionSet]
) -> str:
    files = [
        f"{each.path} ({len(each.questions)} questions, {len(each.documents)} documents)"
        for each in question_sets.values()
    ]
    if texts.sources:
        named = ", ".join(map(str, options.texts))
        where = named or "held-out sources of Python's standard library"
        joined = ", joined" if texts.is_joined else ""
        files.insert(0, f"{where} ({texts.num_tokens} tokens{joined})")
    elif len(question_sets) < len(options.tasks):
        files.insert(0, "generated")
    return "; ".join(files)
