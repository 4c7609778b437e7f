"""Samples of `qa_1` and `qa_2` from small files in the forms of SQuAD and HotpotQA."""

import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.studies.harness.eval_run import EvalError
from ropewalk.studies.ruler.make import make_samples
from ropewalk.studies.ruler.qa import QA_TASKS, QuestionSet
from ropewalk.studies.ruler.qa_files import read_question_sets
from ropewalk.studies.ruler.sample import Sample
from ropewalk.studies.ruler.score import metric_of, string_match_part
from tests.studies.ruler.qa_data import TOWNS, hotpotqa, paragraph, squad, written

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


def encode(text: str) -> Sequence[int]:
    """Return a token for each word and each newline."""
    return [len(part) for part in re.findall(r"\S+|\n", text)]


make = partial(make_samples, seed=0, essay=(), encode=encode, special_ids=(7,))


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, QuestionSet]:
    """Both tasks' questions: 16 documents in four articles, and 11 with one in common."""
    paths = {
        "qa_1": written(tmp_path / "squad.json", squad()),
        "qa_2": written(tmp_path / "hotpotqa.json", hotpotqa()),
    }
    return read_question_sets(paths, 1)


def documents_of(sample: Sample) -> list[str]:
    """The documents of a prompt, by their headings."""
    context = sample.draft.input.split("\n\n", 2)[2].rpartition(f"\n\n{INSTRUCTION}")[0]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_the_prompt_is_rulers(sets: dict[str, QuestionSet]) -> None:
    """The shortest sample has the question's own document, and braces stay as they are."""
    (sample,) = make("qa_1", 1, 92, question_sets=sets)
    asked = re.search(r"bridge (\d) of (\w+) built", sample.draft.input)
    assert asked is not None
    number, town = int(asked[1]), asked[2]
    assert sample.num_units == 1
    assert sample.draft.input == (
        f"{INSTRUCTION}\n\nThe following are given documents.\n\nDocument 1:\n"
        f"{paragraph(town, number)}\n\n{INSTRUCTION}\n\n"
        f"Question: When was bridge {number} of {town} built?"
    )
    assert sample.draft.answer_prefix == " Answer:"
    assert sample.draft.outputs == (str(1800 + number), f"in {1800 + number} {{so}}")
    assert sample.prompt_ids == (7, *encode(sample.draft.input + " Answer:"))


def test_squads_distractors_are_of_the_same_article_first(sets: dict[str, QuestionSet]) -> None:
    """Every document is there once, and the own one always."""
    sizes = set()
    for context_len in range(92, 300, 7):
        for sample in make("qa_1", 8, context_len, question_sets=sets):
            town = sample.draft.input.split(" ")[-2]
            number = int(sample.draft.outputs[0]) - 1800
            shown = documents_of(sample)
            assert len(shown) == len(set(shown)) == sample.num_units
            assert paragraph(town, number) in shown
            near = [each for each in shown if each.startswith(town)]
            assert len(near) == min(4, len(shown))
            sizes.add(len(shown))
    assert {1, 2, 4, 5, 9} <= sizes


def test_hotpotqas_own_documents_are_always_there(sets: dict[str, QuestionSet]) -> None:
    """A document is the title and the sentences, which have their own spaces."""
    sizes = set()
    for context_len in range(115, 180, 7):
        for sample in make("qa_2", 5, context_len, question_sets=sets):
            number = sample.draft.outputs[0].removeprefix("Town")
            shown = documents_of(sample)
            assert {
                "The sea\nAll rivers end here.",
                f"River {number}.1\nIt passes Town{number}. Its length is {number}1 miles.",
                f"River {number}.2\nIt passes Town{number}. Its length is {number}2 miles.",
            } <= {*shown}
            assert len(shown) == len(set(shown)) == sample.num_units
            sizes.add(len(shown))
    assert {3, 4, 6} <= sizes


@pytest.mark.parametrize("task", QA_TASKS)
def test_a_longer_context_has_the_same_documents_in_the_same_order(
    task: str, sets: dict[str, QuestionSet]
) -> None:
    """The others are between them, so the own documents keep their depth."""
    long = make(task, 5, 160, question_sets=sets)
    own_first = set()
    for shorter, longer in zip(make(task, 5, 115, question_sets=sets), long, strict=True):
        shown = documents_of(shorter)
        assert longer.draft.outputs == shorter.draft.outputs
        assert longer.num_units > shorter.num_units
        assert [each for each in documents_of(longer) if each in shown] == shown
        own_first.add(shorter.draft.outputs[0] in documents_of(longer)[0])
    assert own_first == {True, False}  # documents are shuffled


@pytest.mark.parametrize("task", QA_TASKS)
def test_a_seed_gives_the_same_samples_and_another_one_others(
    task: str, sets: dict[str, QuestionSet]
) -> None:
    """Fewer samples are the first of more, and no question comes twice."""
    samples = make(task, 5, 130, question_sets=sets)
    assert samples == make(task, 5, 130, question_sets=sets)
    assert samples[:2] == make(task, 2, 130, question_sets=sets)
    assert len({each.draft.input.rpartition("Question: ")[2] for each in samples}) == 5
    others = make(task, 5, 130, question_sets=sets, seed=1)
    assert [each.draft.outputs for each in samples] != [each.draft.outputs for each in others]


def test_the_file_is_read_alike_in_both_versions_of_squad(tmp_path: Path) -> None:
    """Questions without an answer are left out, and a repeated paragraph is one document."""
    both = squad(2)
    first = both["data"][0]["paragraphs"]
    first.append({"context": first[0]["context"], "qas": []})
    unanswered = {"question": "?", "answers": [], "is_impossible": True}
    plausible = {**unanswered, "answers": [{"text": "1800", "answer_start": 0}]}
    blank = {"question": "?", "answers": [{"text": " ", "answer_start": 0}], "is_impossible": False}
    first[1]["qas"] += [unanswered, plausible, blank]
    old = written(tmp_path / "1.json", squad(2, has_impossible=False))
    new = written(tmp_path / "2.json", both)
    found = [read_question_sets({"qa_1": each}, 1)["qa_1"] for each in (old, new)]
    assert found[0].questions == found[1].questions
    assert found[0].documents == found[1].documents
    assert found[1].documents == tuple(paragraph(town, at) for town in TOWNS for at in (0, 1))
    assert [each.near for each in found[1].questions[:3]] == [(1,), (0,), (3,)]


def test_a_document_that_a_hotpotqa_question_has_twice_is_one(tmp_path: Path) -> None:
    """A question with a blank answer is left out, and its documents are distractors."""
    content = hotpotqa(2)
    content[0]["answer"] = " "
    content[1]["context"].append(content[1]["context"][0])
    found = read_question_sets({"qa_2": written(tmp_path / "qa.json", content)}, 1)["qa_2"]
    assert len(found.documents) == 5
    assert [each.own for each in found.questions] == [(0, 3, 4)]


@pytest.mark.parametrize("task", QA_TASKS)
def test_samples_fill_their_length_within_one_document(
    task: str, tmp_path: Path, embedded: Checkpoint
) -> None:
    """The length is never exceeded, and one document more would exceed it."""
    content = {"qa_1": squad(40), "qa_2": hotpotqa(300)}[task]
    sets = read_question_sets({task: written(tmp_path / "qa.json", content)}, 4)
    tokens = partial(embedded.tokenizer.encode, add_special_tokens=False)
    tokenised = partial(make, encode=tokens, question_sets=sets)
    for context_len in (1500, 4096):
        for sample in tokenised(task, 4, context_len):
            prompt = sample.draft.input + sample.draft.answer_prefix
            assert sample.prompt_ids == (7, *tokens(prompt))
            longest = max(map(len, map(tokens, sets[task].documents)))
            assert 0 <= context_len - sample.length < longest + len(tokens("\n\nDocument 100:\n"))
            answer = max(len(tokens(f" {each}")) for each in sample.draft.outputs)
            assert sample.max_tokens == (32 if context_len == 4096 else answer + 8)
            assert sample.token_position_answer is None


@pytest.mark.parametrize("task", QA_TASKS)
def test_too_short_a_length_is_refused_with_the_least(
    task: str, sets: dict[str, QuestionSet]
) -> None:
    """The own documents of every question fit the named length."""
    with pytest.raises(
        EvalError, match=rf"--context-lens must be >= \d+ tokens for {task} "
    ) as low:
        make(task, 4, 64, question_sets=sets)
    least = int(re.findall(r">= (\d+)", str(low.value))[0])
    least_units = {"qa_1": 1, "qa_2": 3}[task]
    found = make(task, 4, least, question_sets=sets)
    assert least_units in {each.num_units for each in found}
    with pytest.raises(EvalError, match=f">= {least} tokens"):
        make(task, 4, least - 1, question_sets=sets)


@pytest.mark.parametrize(
    ("task", "stock"),
    [
        ("qa_1", r"--squad: 16 documents in \S+squad.json"),
        ("qa_2", r"--hotpotqa: 11 documents in "),
    ],
)
def test_too_few_documents_are_refused(task: str, stock: str, sets: dict[str, QuestionSet]) -> None:
    """RULER repeats them instead. The error names the option and the file."""
    with pytest.raises(EvalError, match=rf"^{stock}.* are too few for {task} with 2000 tokens$"):
        make(task, 1, 2000, question_sets=sets)


def upstream_part(preds: Sequence[str], refs: Sequence[Sequence[str]]) -> float:
    """Transcription of RULER's string_match_part."""
    score = 0.0
    for pred, ref in zip(preds, refs, strict=True):
        score += max(1.0 if each.lower() in pred.lower() else 0.0 for each in ref)
    return round(score / len(preds) * 100, 2)


def test_the_score_is_one_if_any_reference_is_in_the_answer() -> None:
    """The numbers are RULER's, over random answers and references."""
    rng = random.Random(5)
    words = ["Rome", "rome", "the Rhine", "Rhine", "1873", "18", "é", "É", "ROME 1873"]
    refs = [rng.sample(words, rng.randint(1, 3)) for _ in range(200)]
    preds = [" ".join(rng.sample(words, rng.randint(0, 2))) for _ in range(200)]
    shares = [string_match_part(*each) for each in zip(preds, refs, strict=True)]
    assert {*shares} == {0.0, 1.0}
    assert round(sum(shares) / 2, 2) == upstream_part(preds, refs)
    assert string_match_part("a\x00b ", ["a\nb"]) == 1.0
    assert metric_of("qa_1") is metric_of("qa_2") is string_match_part
