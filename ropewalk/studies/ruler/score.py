"""RULER's metrics (scripts/eval/synthetic/constants.py, evaluate.py)."""

import re
from collections.abc import Callable, Sequence

from ropewalk.studies.ruler.qa import QA_TASKS

Metric = Callable[[str, Sequence[str]], float]  # answer, references -> 0 to 1

_CONTROLS = re.compile(r"[\x00-\x1f]")


def cleaned(pred: str) -> str:
    """Return the answer as RULER scores it: control characters are newlines, ends are stripped."""
    return _CONTROLS.sub("\n", pred.strip()).strip()


def string_match_all(pred: str, outputs: Sequence[str]) -> float:
    """Return the share of references that the answer contains, in any case of letters."""
    text = cleaned(pred).lower()
    return sum(each.lower() in text for each in outputs) / len(outputs)


def string_match_part(pred: str, outputs: Sequence[str]) -> float:
    """Return 1.0 if the answer contains any reference, in any case of letters, otherwise 0.0."""
    text = cleaned(pred).lower()
    return float(any(each.lower() in text for each in outputs))


def metric_of(task: str) -> Metric:
    return string_match_part if task in QA_TASKS else string_match_all


def metric_names(tasks: Sequence[str]) -> str:
    """Return the names of the tasks' metrics, each once, for a title."""
    return ", ".join(dict.fromkeys(metric_of(task).__name__ for task in tasks))
