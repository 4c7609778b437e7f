"""Samples of RULER's tasks by its parameters, their lengths, and its metric."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.studies.harness.eval_run import EvalError
from ropewalk.studies.ruler.frequencies import zipf_counts
from ropewalk.studies.ruler.make import ESSAY_TASKS, TASKS, make_samples
from ropewalk.studies.ruler.niah import NIAH_TASKS
from ropewalk.studies.ruler.qa import QA_TASKS
from ropewalk.studies.ruler.sample import Draft, Maker, MisfitError, Sample, fit
from ropewalk.studies.ruler.score import string_match_all
from ropewalk.studies.ruler.templates import NOISE
from ropewalk.studies.ruler.words import ADJECTIVES, NOUNS

ESSAY = [f"word{number}{'.' if number % 9 == 8 else ''}" for number in range(4000)]
GENERATED = tuple(task for task in TASKS if task not in QA_TASKS)  # from no file
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.(?=\s|$)")
NUMBER, UUID = r"[1-9]\d{6}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
# name -> needles with an own key or value, references, pattern of values
NIAH = {
    "niah_single_1": (1, 1, NUMBER),
    "niah_single_2": (1, 1, NUMBER),
    "niah_single_3": (1, 1, UUID),
    "niah_multikey_1": (4, 1, NUMBER),
    "niah_multikey_2": (None, 1, NUMBER),
    "niah_multikey_3": (None, 1, UUID),
    "niah_multivalue": (4, 4, NUMBER),
    "niah_multiquery": (4, 4, NUMBER),
}


def encode(text: str) -> Sequence[int]:
    """Return a token for each word and each newline."""
    return [len(part) for part in re.findall(r"\S+|\n", text)]


make = partial(make_samples, seed=0, essay=ESSAY, question_sets={}, encode=encode, special_ids=(7,))


def one(task: str, context_len: int = 1500) -> Sample:
    """The first sample of a task."""
    (sample,) = make(task, 1, context_len)
    return sample


@pytest.mark.parametrize("task", NIAH)
def test_niah_has_the_needles_of_its_parameters(task: str) -> None:
    """The questions' needles are in the context once, and their values are the references."""
    num_needles, num_outputs, pattern = NIAH[task]
    sample = one(task)
    found = NEEDLE.findall(sample.draft.input)
    assert len(found) == (num_needles or sample.num_units + 1)
    assert all(re.fullmatch(pattern, value) for _, _, value in found)
    question = sample.draft.input.rpartition("\n")[2]
    asked = re.search(r" for (.*) mentioned", question)
    assert asked is not None
    keys = re.split(r", and |, ", asked[1])
    assert len(keys) == NIAH_TASKS[task].num_queries
    values = [value for key in keys for _, each, value in found if each == key]
    assert sorted(values) == sorted(sample.draft.outputs)
    assert len(set(values)) == num_outputs
    plural = num_outputs > 1
    kind = "uuid" if pattern == UUID else "number"
    assert question.startswith(
        f"What are all the special magic {kind}s"
        if plural
        else f"What is the special magic {kind} "
    )
    assert sample.draft.answer_prefix == (
        f" The special magic {kind}{'s' * plural} for {asked[1]} mentioned in the provided text "
        f"{'are' if plural else 'is'}"
    )
    if task == "niah_single_1":
        assert sample.draft.input.count(NOISE) == sample.num_units
    if task in ESSAY_TASKS:
        text = NEEDLE.sub("", sample.draft.input)
        assert re.findall(r"word\d+\.?", text) == ESSAY[: sample.num_units]


@pytest.mark.parametrize("task", GENERATED)
def test_needles_have_the_position_of_the_first_reference(task: str) -> None:
    """So many tokens are before it in the text, without special tokens."""
    sample = one(task)
    if task not in NIAH:
        assert sample.token_position_answer is None
        return
    assert sample.token_position_answer is not None
    words = re.findall(r"\S+|\n", sample.draft.input)
    assert words[sample.token_position_answer] == f"{sample.draft.outputs[0]}."


def test_vt_has_a_chain_of_four_hops_in_order_after_a_solved_example() -> None:
    """Five names of five letters have the value; the example's have three letters."""
    sample = one("vt")
    example, _, own = sample.draft.input.rpartition("\n\n\n\n")
    for text, letters, names in (
        (own, 5, sample.draft.outputs),
        (example, 3, example.split()[-5:]),
    ):
        lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text)
        assert [name for name, _ in lines] == list(names)
        assert [source for _, source in lines[1:]] == list(names)[:-1]
        assert {len(name) for name in names} == {letters}
        assert f"assigned the value {lines[0][1]}" in text
        assert (lines[0][1] == "12345") == (letters == 3)
        assert 10_000 <= int(lines[0][1]) < 100_000
    assert sample.draft.answer_prefix.endswith(
        f"5 variables are assigned the value {re.findall(r'[0-9]{5}', own)[0]}, they are: "
    )


@pytest.mark.parametrize(("context_len", "repeats"), [(1500, (6, 1)), (4096, (30, 3))])
def test_cwe_repeats_its_ten_words_by_the_length(
    context_len: int, repeats: tuple[int, int]
) -> None:
    """The last list has ten common words, and all others more rarely."""
    sample = one("cwe", context_len)
    question = sample.draft.input.rpartition("Below is")[2]
    numbered = re.findall(r"(\d+)\. (\S+)", question)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    counts = Counter(word for _, word in numbered)
    assert len(counts) == sample.num_units
    assert {word for word, count in counts.items() if count == repeats[0]} == {
        *sample.draft.outputs
    }
    assert set(counts.values()) == set(repeats)


def test_fwe_shows_each_rank_as_often_as_zipf_says() -> None:
    """Ranks two to four are the answer, and no other word is as frequent."""
    sample = one("fwe")
    text = sample.draft.input.partition("coded words. ")[2].partition("\nQuestion")[0]
    ranks = Counter(text.split()).most_common()
    assert ranks[0][0] == "..."
    assert {word for word, _ in ranks[1:4]} == {*sample.draft.outputs}
    assert ranks[3][1] > ranks[4][1]
    total = sum(1 / rank**2 for rank in range(1, 10**6))
    for num_words, rank in ((1000, 1), (1000, 2), (1000, 5), (37, 4)):
        assert zipf_counts(num_words, 30)[rank - 1] == int(num_words / rank**2 / total)
    shown = sample.num_units
    while zipf_counts(shown, 30)[3] == zipf_counts(shown, 30)[4]:
        shown -= 1
    assert [count for _, count in ranks] == [each for each in zipf_counts(shown, 30) if each]


@pytest.mark.parametrize("task", GENERATED)
@pytest.mark.parametrize("context_len", [700, 4096])
def test_samples_fill_their_length_within_one_unit(task: str, context_len: int) -> None:
    """Prompt, special token and budget are below the limit by less than a unit's tokens."""
    unit = {"niah_single_1": 20, "vt": 20, "cwe": 60, "fwe": 250}.get(task, 12)
    for sample in make(task, 3, context_len):
        prompt = sample.draft.input + sample.draft.answer_prefix
        assert sample.prompt_ids == (7, *encode(prompt))
        assert 0 <= context_len - sample.length < unit
        full = {"vt": 30, "cwe": 120, "fwe": 50}.get(task, 128)
        assert (sample.max_tokens == full) == (context_len == 4096)
        assert sample.max_tokens >= len(sample.draft.outputs)


def test_a_seed_gives_the_same_samples_and_another_one_others() -> None:
    """A sample asks the same at every length."""
    for task in GENERATED:
        first, second = make(task, 2, 900)
        assert (first, second) == make(task, 2, 900)
        assert first.draft.outputs != second.draft.outputs
        assert make(task, 1, 1100)[0].draft.outputs == first.draft.outputs
        assert make(task, 1, 900, seed=1)[0].draft.outputs != first.draft.outputs


@pytest.mark.parametrize("task", GENERATED)
def test_too_short_a_length_is_refused_with_the_least(task: str, embedded: Checkpoint) -> None:
    """The named length works, and one token less does not."""
    tokens = partial(embedded.tokenizer.encode, add_special_tokens=False)
    with pytest.raises(
        EvalError, match=rf"--context-lens must be >= \d+ tokens for {task} "
    ) as low:
        make(task, 2, 64, encode=tokens)
    least = int(re.findall(r">= (\d+)", str(low.value))[0])
    assert len(make(task, 2, least, encode=tokens)) == 2
    with pytest.raises(EvalError, match=f">= {least} tokens"):
        make(task, 2, least - 1, encode=tokens)


def test_too_short_an_essay_is_refused() -> None:
    """The error names the option and the number of words."""
    with pytest.raises(EvalError, match="--text: 50 words are too few for niah_single_2 with 700"):
        make("niah_single_2", 1, 700, essay=ESSAY[:50])


@pytest.mark.parametrize("limit", range(20, 140, 7))
def test_the_most_units_that_fit_are_found(limit: int) -> None:
    """The reference tries every number of units, of very different sizes."""
    sizes = [1, 5, 0, 30, 2, 2, 0, 9, 4, 40, 1, 1, 1, 1, 1, 1, 1, 60, 2]

    def build(count: int) -> Draft:
        return Draft("a " * sum(sizes[:count]), "", ("b",))

    def made() -> int:
        maker = Maker(build, 128, least=1, most=len(sizes))
        return fit("t", 0, maker, limit, encode=encode, special_ids=()).num_units

    fitting = [at for at in range(1, len(sizes) + 1) if sum(sizes[:at]) + 9 <= limit]
    assert made() == max(fitting)


def test_a_haystack_that_ends_first_is_a_misfit() -> None:
    """There are more tokens of room than text."""
    maker = Maker(lambda count: Draft("a " * count, "", ("b",)), 128, least=1, most=5)
    with pytest.raises(MisfitError):
        fit("t", 0, maker, 100, encode=encode, special_ids=())


@pytest.mark.parametrize(
    ("pred", "outputs", "share"),
    [
        (" 12 and 345", ["12", "345"], 1.0),
        ("12", ["12", "345"], 0.5),
        ("the AMBER-tower", ["amber-Tower"], 1.0),
        ("", ["a"], 0.0),
        ("x1234567y", ["1234567"], 1.0),
        ("a\x00b", ["a\nb"], 1.0),
        ("a b c", ["a", "b", "c", "d", "e"], 0.6),
    ],
)
def test_the_score_is_the_share_of_references_in_the_answer(
    pred: str, outputs: list[str], share: float
) -> None:
    """The numbers are by hand, from string_match_all and postprocess_pred of RULER."""
    assert string_match_all(pred, outputs) == pytest.approx(share)


def test_words_are_different_and_have_no_hyphen() -> None:
    """A few hundred of each, as keys are adjective-noun."""
    words = sorted([*ADJECTIVES, *NOUNS])
    assert min(len(ADJECTIVES), len(NOUNS)) > 200
    assert all(one != other for one, other in pairwise(words))
    assert all(re.fullmatch("[a-z]+", word) for word in words)
