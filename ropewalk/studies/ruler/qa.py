"""Questions about documents: `qa_1` and `qa_2` (RULER's scripts/data/synthetic/qa.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.studies.ruler.sample import Draft, Maker, rng_of
from ropewalk.studies.ruler.templates import DOCUMENT, QA

# The option that names each task's file.
QA_FLAGS = {"qa_1": "--squad", "qa_2": "--hotpotqa"}
QA_TASKS = tuple(QA_FLAGS)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its references. Documents are given by their index in the set."""

    query: str
    outputs: tuple[str, ...]  # at least one, none of them blank; any of them is right
    own: tuple[int, ...]  # documents that every sample has, at least one
    near: tuple[int, ...]  # the first distractors: the other documents of the article


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions and documents of one file."""

    path: Path
    documents: tuple[str, ...]  # each once
    questions: tuple[Question, ...]

    def choose(self, count: int, seed: object) -> list[Question]:
        """Return different questions in random order; a smaller count gives the first ones."""
        order = list(range(len(self.questions)))
        rng_of(seed, "questions").shuffle(order)
        return [self.questions[at] for at in order[:count]]


def qa_maker(question: Question, documents: Sequence[str], seed: object) -> Maker:
    """Return the maker of one sample, whose units are documents.

    More units are the same documents and others. Each document has a random place of its own, so
    the depth of the question's own documents is about the same with any number of units.
    """

    def build(num_units: int) -> Draft:
        shown = _shown(question, num_units, len(documents), seed)
        rng = rng_of(seed, "places")
        places = {each: rng.random() for each in shown}
        ordered = sorted(shown, key=places.__getitem__)
        context = "\n\n".join(
            DOCUMENT.format(i=number, document=documents[each])
            for number, each in enumerate(ordered, start=1)
        )
        return Draft(
            QA.question.format(context=context, query=question.query),
            QA.answer_prefix,
            question.outputs,
        )

    return Maker(
        build, QA.answer_tokens, least=len(question.own), most=len(documents), needs_all=False
    )


def _shown(question: Question, count: int, num_documents: int, seed: object) -> list[int]:
    """Return the documents of a sample: its own, then those of the article, then any others."""
    rng = rng_of(seed, "distractors")
    near = rng.sample(question.near, len(question.near))
    shown = dict.fromkeys([*question.own, *near][:count])
    while len(shown) < count:
        shown[rng.randrange(num_documents)] = None
    return list(shown)
