"""Answers to RULER's tasks as files that RULER's own scorer reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.evaluation.cells import LengthCell, Score
from server.evaluation.report import Answered, LengthReport
from server.evaluation.tasks.sample import Sample, SampleScore
from server.study.eval_run import write_texts, writing


def pair_up(cell: LengthCell, scores: Sequence[Score]) -> tuple[Answered, ...]:
    """Return the samples of a task's cell with their scores."""
    return tuple(
        Answered(task.of, score)
        for task, score in zip(cell.tasks, scores, strict=True)
        if isinstance(task.of, Sample) and isinstance(score, SampleScore)
    )


def write_predictions(report: LengthReport, folder: Path) -> None:
    """Write `VARIANT/LENGTH/TASK.jsonl` to the folder. Raises EvalError.

    VARIANT/LENGTH is a `--data_dir` of RULER's scripts/eval/evaluate.py.
    """
    for row in report.rows:
        inside = folder / row.variant.label.replace(" ", "-") / str(row.context_len)
        with writing(inside):
            inside.mkdir(parents=True, exist_ok=True)
        texts = {
            f"{task}.jsonl": "".join(f"{json.dumps(_line(each))}\n" for each in answered)
            for task, answered in row.answered.items()
        }
        write_texts(inside, texts)


def _line(answered: Answered) -> dict[str, Any]:
    """Return one line with RULER's fields, and the score."""
    sample, score = answered.sample, answered.score
    line = {
        "index": sample.index,
        "pred": score.pred,
        "input": sample.draft.input,
        "outputs": sample.draft.outputs,
        "others": {},
        "truncation": -1,
        "length": sample.length,
        # RULER adds the tokens of a chat template that `input` leaves out. There is none.
        "length_w_model_temp": sample.length,
        "answer_prefix": sample.draft.answer_prefix,
        "tokens_to_generate": sample.max_tokens,
        "score": 100 * score.share,
    }
    if sample.token_position_answer is not None:
        line["token_position_answer"] = sample.token_position_answer
    return line
