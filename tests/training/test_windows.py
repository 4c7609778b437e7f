"""The windows of a step: needles, the tokens that count, and repeatable draws."""

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer

from ropewalk.server.corpus.held_out import is_held_out, library_documents
from training.pieces import Kind, Piece
from training.text import Corpus
from training.tokenizer import ASSISTANT, BOS_ID, EOS, EOS_ID, USER_ID
from training.windows import EARLY, LATE, Windows

NATIVE_LEN = 256
DEFINED = re.compile(
    r"(?:^|\|>)[ \t]*(?:# The pass key of )?(\w+)(?: = | is )(\d{5})$", re.MULTILINE
)
ASKED = re.compile(
    r"(?:print\((\w+)\)  # -> |assert (\w+) == |# The pass key of (\w+) is |(\w+) = "
    r"|What is (?:the value of )?(\w+)\?<.assistant.>|Tell me (\w+)\.<.assistant.>)$"
)


@pytest.fixture(scope="module")
def windows(corpus: Corpus) -> Windows:
    """Windows over the small corpus."""
    return Windows(corpus.tokenizer, corpus.library, corpus.tests, NATIVE_LEN, seed=3)


def answers(tokenizer: Tokenizer, window: Piece) -> list[tuple[str, str]]:
    """Every answer with all the text before it."""
    found, at = [], 0
    while Kind.ANSWER in window.kinds[at:]:
        start = window.kinds.index(Kind.ANSWER, at)
        at = next(
            (i for i in range(start, len(window)) if window.kinds[i] is not Kind.ANSWER),
            len(window),
        )
        before = tokenizer.decode(window.tokens[:start], skip_special_tokens=False)
        answer = tokenizer.decode(window.tokens[start:at], skip_special_tokens=False)
        found.append((before, answer))
    return found


@pytest.mark.parametrize("kind", ["needles", "dense", "chat"])
def test_an_answer_is_the_value_that_stands_before_it_under_that_key(
    windows: Windows, tokenizer: Tokenizer, kind: str
) -> None:
    """Regular expressions read the text of fifty windows of each kind."""
    make: Callable[[random.Random], Piece] = getattr(windows, kind)
    num_answers = 0
    for seed in range(50):
        for before, answer in answers(tokenizer, make(random.Random(seed))):
            asked = ASKED.search(before)
            assert asked, before[-60:]
            key = next(name for name in asked.groups() if name)
            defined = dict(DEFINED.findall(before))
            value = answer.removesuffix(EOS)
            assert defined[key] == value, (key, value)
            assert answer.endswith(EOS) == (ASSISTANT in before[-len(ASSISTANT) :])
            num_answers += 1
    assert num_answers > 50


def test_a_definition_is_no_lesson_and_lies_between_whole_lines(
    windows: Windows, tokenizer: Tokenizer
) -> None:
    """The digits of a definition are random, so only the text around it counts."""
    lines = 0
    for seed in range(50):
        window = windows.needles(random.Random(seed))
        text = tokenizer.decode(window.tokens, skip_special_tokens=False)
        counted = tokenizer.decode(
            [t for t, k in zip(window.tokens, window.kinds, strict=True) if k is Kind.TEXT]
        )
        for key, value in DEFINED.findall(text):
            if f"{key} = {value}" in text or f"pass key of {key} is {value}" in text:
                assert value not in counted
                lines += 1
    assert lines > 50


def test_every_window_is_whole_and_begins_with_bos(windows: Windows) -> None:
    """The shape is [count, native_len + 1], and the first token is ignored."""
    for step in range(30):
        batch = windows.batch(step, 8, LATE)
        assert batch.tokens.shape == batch.kinds.shape == (8, NATIVE_LEN + 1)
        assert (batch.tokens[:, 0] == BOS_ID).all()
        assert (batch.kinds[:, 0] == Kind.IGNORED).all()
        assert (batch.tokens < 600).all()


def test_a_chat_is_turns(windows: Windows) -> None:
    """The user comes first, and every answer ends with eos before the next user's turn."""
    for seed in range(30):
        window = windows.chat(random.Random(seed))
        assert window.tokens[1] == USER_ID
        ends = [at for at, token in enumerate(window.tokens) if token == EOS_ID]
        spoken = [at for at in ends if window.kinds[at] is Kind.ANSWER]
        assert spoken
        assert spoken[-1] == len(window) - 1
        assert all(window.tokens[at + 1] == USER_ID for at in spoken[:-1])


def test_repeats_repeat(windows: Windows) -> None:
    """Tokens that count as repeated are at the same place of an earlier copy."""
    window = windows.repeats(random.Random(5))
    first = window.kinds.index(Kind.REPEAT)
    length = next(
        n for n in range(2, first) if window.tokens[1 : 1 + n] == window.tokens[first - 1 :][:n]
    )
    assert length >= 2


def test_the_same_step_is_the_same_windows(corpus: Corpus, windows: Windows) -> None:
    """Another object gives the same windows; another step or seed gives others."""
    again = Windows(corpus.tokenizer, corpus.library, corpus.tests, NATIVE_LEN, seed=3)
    other = Windows(corpus.tokenizer, corpus.library, corpus.tests, NATIVE_LEN, seed=4)
    here = windows.batch(7, 8, EARLY)
    assert np.array_equal(here.tokens, again.batch(7, 8, EARLY).tokens)
    assert np.array_equal(here.kinds, again.batch(7, 8, EARLY).kinds)
    assert not np.array_equal(here.tokens, windows.batch(8, 8, EARLY).tokens)
    assert not np.array_equal(here.tokens, other.batch(7, 8, EARLY).tokens)


def test_held_out_files_are_not_trained_on() -> None:
    """Names and contents differ, and about a sixteenth is held out."""
    read = library_documents(held_out=False)
    held_out = library_documents(held_out=True)
    assert not {each.name for each in read} & {each.name for each in held_out}
    assert not {each.text for each in read} & {each.text for each in held_out}
    assert 1 / 32 < len(held_out) / (len(read) + len(held_out)) < 1 / 8
    assert all(is_held_out(each.name) for each in held_out)
    assert not any("test" in each.name.split("/") for each in [*read, *held_out])
