"""Needles as tokens, with the kind of each token for the loss.

A definition's value is random, so its prediction teaches nothing. The answer to a question is the
purpose of the training on needles.
"""

import random
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Tokenizer

from ropewalk.server.corpus.needles import (
    FORMS,
    VALUE_DIGITS,
    Form,
    Needle,
    random_key,
    random_value,
)
from training.tokenizer import ASSISTANT, EOS, USER, whole_words

_CHAT_QUESTIONS = ("What is {k}?", "What is the value of {k}?", "Tell me {k}.")
_SILENT = 4  # first tokens of a question, without loss, because no context predicts them


class Kind(IntEnum):
    """The role of a token in the loss."""

    IGNORED = 0
    TEXT = 1
    QUESTION = 2  # a question after its first tokens, without the answer
    ANSWER = 3
    REPEAT = 4  # the second and later copies of a random segment


WEIGHT_OF_KIND = (0.0, 1.0, 0.3, 2.5, 1.0)  # weight in the loss, by Kind


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence of tokens and their kinds."""

    tokens: list[int]
    kinds: list[Kind]

    def __len__(self) -> int:
        return len(self.tokens)


class Pieces:
    """A builder of the pieces of needles."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = whole_words(tokenizer)

    def needles(self, rng: random.Random, count: int, form: Form | None = None) -> list[Needle]:
        """Draw `count` needles with different keys, all of `form` or each of a random form."""
        values: dict[str, str] = {}
        while len(values) < count:
            values[self._key(rng)] = random_value(rng)
        return [Needle(form or rng.choice(FORMS), key, value) for key, value in values.items()]

    def _key(self, rng: random.Random) -> str:
        """Draw a key like PORT_4821 half of the time, else a key of two words."""
        if rng.random() < 0.5:
            return random_key(rng)
        first = rng.choice(self._words)
        if rng.random() < 0.5:
            first = random_key(rng).split("_")[0].lower()
        return f"{first}_{rng.choice(self._words)}"

    def definition(self, needle: Needle) -> Piece:
        """Encode the line to hide; none of its tokens counts in the loss."""
        tokens = self._tokenizer.encode(needle.definition).ids
        return Piece(tokens, [Kind.IGNORED] * len(tokens))

    def question(self, needle: Needle) -> Piece:
        line = needle.question + needle.value + needle.form.after
        tokens = self._tokenizer.encode(line).ids
        return Piece(tokens, _kinds(len(tokens), len(tokens) - VALUE_DIGITS - 1, VALUE_DIGITS))

    def chat_question(self, rng: random.Random, needle: Needle) -> Piece:
        """Encode a user's question and the answer, whose eos ends the turn."""
        question = rng.choice(_CHAT_QUESTIONS).format(k=needle.key)
        tokens = self._tokenizer.encode(f"{question}{ASSISTANT}{needle.value}{EOS}").ids
        return Piece(tokens, _kinds(len(tokens), len(tokens) - VALUE_DIGITS - 1, VALUE_DIGITS + 1))

    def turn(self) -> Piece:
        return Piece(self._tokenizer.encode(USER).ids, [Kind.IGNORED])


def _kinds(length: int, answer_at: int, answer_len: int) -> list[Kind]:
    kinds = [Kind.IGNORED] * min(_SILENT, answer_at)
    kinds += [Kind.QUESTION] * (length - len(kinds))
    kinds[answer_at : answer_at + answer_len] = [Kind.ANSWER] * answer_len
    return kinds
