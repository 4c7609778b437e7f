"""Files of SQuAD and HotpotQA, read into sets of questions.

SQuAD is arXiv 1606.05250 (v1.1) and 1806.03822 (v2.0), HotpotQA is arXiv 1809.09600.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ropewalk.studies.harness.eval_run import EvalError
from ropewalk.studies.ruler.qa import QA_FLAGS, Question, QuestionSet

_DataT = TypeVar("_DataT")


class _Part(BaseModel):
    """A part of a file. Fields that no task needs are left out."""

    model_config = ConfigDict(strict=True, frozen=True)


class _SquadAnswer(_Part):
    text: str


class _SquadQuestion(_Part):
    question: str
    answers: list[_SquadAnswer]
    is_impossible: bool = False  # v1.1 does not have it


class _SquadParagraph(_Part):
    context: str
    qas: list[_SquadQuestion]


class _SquadArticle(_Part):
    paragraphs: list[_SquadParagraph]


class _Squad(_Part):
    data: list[_SquadArticle]


class _HotpotQuestion(_Part):
    question: str
    answer: str
    # A title and its sentences, which have their own spaces.
    context: Annotated[list[tuple[str, list[str]]], Field(min_length=1)]


def read_question_sets(paths: Mapping[str, Path], num_samples: int) -> dict[str, QuestionSet]:
    """Read the file of each task that has one.

    Raises EvalError if a file cannot be read, has another form, or has less than `num_samples`
    questions with an answer.
    """
    sets = {}
    for task, path in paths.items():
        found = _READERS[task](path)
        if not found.questions:
            raise EvalError(f"{QA_FLAGS[task]}: {path} has no question with an answer")
        if len(found.questions) < num_samples:
            raise EvalError(
                f"--samples must be <= {len(found.questions)}, so many questions with an answer "
                f"has {path} ({QA_FLAGS[task]}), got {num_samples}"
            )
        sets[task] = found
    return sets


def _read_squad(path: Path) -> QuestionSet:
    """Read SQuAD's JSON. A document is a paragraph; those of its article are near it."""
    file = _parsed(path, TypeAdapter(_Squad), "--squad", "SQuAD's")
    paragraphs = [each for article in file.data for each in article.paragraphs]
    number_of = _numbered(each.context for each in paragraphs)
    questions = []
    for article in file.data:
        inside = dict.fromkeys(number_of[each.context] for each in article.paragraphs)
        for paragraph in article.paragraphs:
            own = number_of[paragraph.context]
            near = tuple(each for each in inside if each != own)
            for asked in paragraph.qas:
                outputs = tuple(each.text for each in asked.answers if each.text.strip())
                if outputs and not asked.is_impossible:
                    questions.append(Question(asked.question, outputs, (own,), near))
    return QuestionSet(path, tuple(number_of), tuple(questions))


def _read_hotpotqa(path: Path) -> QuestionSet:
    """Read HotpotQA's JSON. A question's own documents are all those of its context."""
    file = _parsed(path, TypeAdapter(list[_HotpotQuestion]), "--hotpotqa", "HotpotQA's")
    number_of = _numbered(text for asked in file for text in _hotpot_documents(asked))
    questions = [
        Question(
            asked.question,
            (asked.answer,),
            tuple(dict.fromkeys(number_of[text] for text in _hotpot_documents(asked))),
            (),
        )
        for asked in file
        if asked.answer.strip()
    ]
    return QuestionSet(path, tuple(number_of), tuple(questions))


_READERS: dict[str, Callable[[Path], QuestionSet]] = {
    "qa_1": _read_squad,
    "qa_2": _read_hotpotqa,
}


def _hotpot_documents(asked: _HotpotQuestion) -> list[str]:
    return [f"{title}\n{''.join(sentences)}" for title, sentences in asked.context]


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def _parsed(path: Path, form: TypeAdapter[_DataT], flag: str, whose: str) -> _DataT:
    """Read and parse a file. Raises EvalError, which names the first field of another form."""
    try:
        return form.validate_json(path.read_bytes())
    except OSError as error:
        raise EvalError(f"{flag}: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        place = f"{field}: " if field else ""
        raise EvalError(f"{flag}: {path} is not {whose} JSON: {place}{first['msg']}") from error
