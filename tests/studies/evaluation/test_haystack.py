"""Contexts with needles have the stated lengths, positions and depths."""

import dataclasses
import math
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.server.corpus.haystack import Haystack, Query
from ropewalk.server.corpus.held_out import Document
from ropewalk.server.corpus.needles import FORMS, SENTENCE
from ropewalk.studies.evaluation.intervals import Z, exponential, mean, proportion
from ropewalk.studies.evaluation.plan import EvalError, LengthPlan
from ropewalk.studies.evaluation.texts import (
    Texts,
    choose_haystacks,
    choose_windows,
    make_texts,
    read_documents,
)

DEPTHS = (0.0, 0.14, 0.29, 0.43, 0.57, 0.71, 0.86, 1.0)
LENS = (128, 300, 2048)
PLAN = LengthPlan(
    native_len=256,
    carries_scaling=False,
    context_lens=LENS,
    variants=(),
    num_windows=12,
    target_tokens=64,
    num_queries=32,
    forms=FORMS,
    depths=DEPTHS,
    seed=3,
    suggested_lens=(),
)


@pytest.fixture(scope="module")
def texts(embedded: Checkpoint) -> Texts:
    """The texts of the held-out library."""
    return make_texts(read_documents(()), embedded.tokenizer, max(LENS))


@pytest.fixture(scope="module")
def haystacks(texts: Texts, embedded: Checkpoint) -> list[Haystack]:
    """As many haystacks as a run has."""
    return choose_haystacks(texts, PLAN, embedded.tokenizer)


def test_every_form_and_depth_is_asked_for_equally_often(haystacks: list[Haystack]) -> None:
    """Eight of 32 questions have each form, and four have each depth."""
    asked = [
        (needle.form.name, depth)
        for haystack in haystacks
        for needle, depth in zip(haystack.needles, haystack.depths, strict=True)
    ]
    assert sorted(asked) == sorted((form.name, depth) for form in FORMS for depth in DEPTHS)


def test_needles_of_the_sentence_form_are_plain_english(texts: Texts, embedded: Checkpoint) -> None:
    """The question is the definition's beginning, and no two needles of a context share a key."""
    plan = dataclasses.replace(PLAN, forms=(SENTENCE,))
    for haystack in choose_haystacks(texts, plan, embedded.tokenizer):
        assert len({needle.key for needle in haystack.needles}) == len(haystack.needles)
        for needle in haystack.needles:
            pattern = r"The secret number of the [a-z]+ [a-z]+ is \d{5}\.\n"
            assert re.fullmatch(pattern, needle.definition)
            assert needle.definition == f"{needle.question}{needle.value}.\n"


@pytest.mark.parametrize("context_len", LENS)
def test_a_context_has_its_length_and_its_needles_where_it_says(
    haystacks: list[Haystack], embedded: Checkpoint, context_len: int
) -> None:
    """The prompt's tokens are decoded and searched."""
    for haystack in haystacks[:3]:
        queries = haystack.queries(context_len, embedded.tokenizer)
        assert len(queries) == len(haystack.needles) == 4
        for query, wanted in zip(queries, haystack.depths, strict=True):
            _check(query, wanted, queries, context_len, embedded)


def _check(
    query: Query, wanted: float, queries: list[Query], context_len: int, embedded: Checkpoint
) -> None:
    ids = list(query.prompt_ids)
    assert len(ids) + query.max_tokens == context_len
    assert query.max_tokens >= 6
    assert ids[0] == 0  # the beginning of every text

    def decode(some: list[int]) -> str:
        return embedded.tokenizer.decode(some)

    assert decode(ids[query.position :]).startswith(query.needle.definition)
    # It is a line of its own; in front of the first nothing may be left.
    assert query.position == 1 or decode(ids[: query.position]).endswith("\n")
    text = decode(ids)
    assert text.endswith("\n" + query.needle.question)
    filler = text.removesuffix(query.needle.question)
    before = filler[: filler.index(query.needle.definition)]
    for other in queries:
        assert filler.count(other.needle.definition) == 1
        assert other.needle.key in text
        before = before.replace(other.needle.definition, "")
        filler = filler.replace(other.needle.definition, "")
        # All but the questions is common, so the prefix cache shares it.
        common = sum(1 for _ in _common(query.prompt_ids, other.prompt_ids))
        assert common >= len(ids) - 20
    share = len(embedded.tokenizer.encode(before)) / len(embedded.tokenizer.encode(filler))
    # Tokens differ where a needle stood between two lines.
    assert query.depth == pytest.approx(share, abs=8 / context_len)
    if context_len >= 1024:
        assert query.depth == pytest.approx(wanted, abs=0.05)  # lines are whole


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    found = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        found.append(a)
    return found


def test_longer_contexts_begin_earlier_and_end_alike(
    haystacks: list[Haystack], embedded: Checkpoint
) -> None:
    """The needles and the lines before the question are the same at every length."""
    for haystack in haystacks[:3]:
        ends = []
        for context_len in LENS:
            query = haystack.queries(context_len, embedded.tokenizer)[0]
            text = embedded.tokenizer.decode(list(query.prompt_ids))
            for needle in haystack.needles:
                text = text.replace(needle.definition, "")
            ends.append(text[-60:])
        assert len(set(ends)) == 1


def test_targets_are_the_same_at_every_length_and_do_not_overlap(
    texts: Texts, embedded: Checkpoint
) -> None:
    """Each prompt has exactly its length and ends with the text of the shorter one."""
    windows = choose_windows(texts, PLAN, embedded.tokenizer)
    assert len(windows) == 12
    for window in windows:
        prompts = [window.prompt(each, texts.special_ids) for each in LENS]
        assert [len(each) for each in prompts] == list(LENS)
        for short, long in pairwise(prompts):
            assert long[-len(short) + 1 :] == short[1:]
    places = [(each.source, each.end // 64) for each in windows]
    assert len(set(places)) == len(places)


def test_texts_too_short_alone_are_joined_and_too_short_together_refused(
    embedded: Checkpoint,
) -> None:
    """The refusal of texts that are too short together states the limit."""
    line = "".join(random.Random(0).choices("abcdefgh \n", k=4000))
    documents = [Document("one", line), Document("two", line)]
    length = len(embedded.tokenizer.encode(line, add_special_tokens=False))
    alone = make_texts(documents, embedded.tokenizer, length)
    assert not alone.is_joined
    assert [each.name for each in alone.sources] == ["one", "two"]
    joined = make_texts(documents, embedded.tokenizer, length + 1)
    assert joined.is_joined
    assert len(joined.sources) == 1
    with pytest.raises(EvalError, match=rf"must be <= {joined.num_tokens} tokens.*got 99999"):
        make_texts(documents, embedded.tokenizer, 99_999)


def test_a_text_without_lines_has_no_place_for_needles(embedded: Checkpoint) -> None:
    """The refusal of a text without enough lines counts its lines."""
    texts = make_texts([Document("one line", "word " * 5000)], embedded.tokenizer, 300)
    plan = dataclasses.replace(PLAN, context_lens=(300,))
    with pytest.raises(EvalError, match="one line has 1 of them; it must have more than 4"):
        choose_haystacks(texts, plan, embedded.tokenizer)


@pytest.mark.parametrize(("right", "of"), [(0, 8), (3, 8), (31, 32), (32, 32)])
def test_wilsons_interval_solves_its_equation(right: int, of: int) -> None:
    """At each end, the observed share is z standard errors away."""
    found = proportion(right, of)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        if 1e-9 < end < 1 - 1e-9:
            error = math.sqrt(end * (1 - end) / of)
            assert abs(found.value - end) == pytest.approx(Z * error)


def test_a_mean_has_the_standard_error_of_numpy() -> None:
    """The perplexity and its interval are the exponentials of the mean's numbers."""
    values = [0.3, 1.2, 2.2, 0.9]
    reach = Z * np.std(values, ddof=1) / 2
    found = mean(values)
    assert (found.value, found.low, found.high) == pytest.approx(
        (np.mean(values), np.mean(values) - reach, np.mean(values) + reach)
    )
    scaled = exponential(mean(values))
    assert scaled.value == pytest.approx(math.exp(np.mean(values)))
    assert scaled.high == pytest.approx(math.exp(np.mean(values) + reach))
    assert mean([2.0]).low is None
