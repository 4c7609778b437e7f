"""The windows of a step: native_len + 1 tokens each, with a kind for every token.

The windows depend only on the documents, the seed and the arguments of `batch`. A resumed run
therefore reads the same windows. The first token of a window is always bos.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ropewalk.server.corpus.needles import FORMS
from training.pieces import Kind, Piece, Pieces
from training.text import Tokens
from training.tokenizer import BOS_ID, EOS_ID, SPECIAL_TOKENS

Kinds = NDArray[np.int64]
_AT_START, _AT_END = 0.1, 0.05  # shares of stretches at a document's start, at its end
_TESTS_SHARE = 0.3  # share of stretches from the library's tests, if there are any
_QUESTION_AT_END = 0.4  # share of questions; others are anywhere after the definitions


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the kinds of windows; the remainder is natural text."""

    needles: float
    chat: float
    dense: float
    repeats: float


# Until retrieval has formed, most windows are of the kinds that form it.
EARLY = Mix(needles=0.10, chat=0.05, dense=0.35, repeats=0.40)
MIDDLE = Mix(needles=0.22, chat=0.08, dense=0.18, repeats=0.07)
LATE = Mix(needles=0.20, chat=0.07, dense=0.09, repeats=0.03)
# Text is learned by then. At 8 L a needle stands in eight times the text of a window.
POLISH = Mix(needles=0.30, chat=0.10, dense=0.25, repeats=0.05)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and kinds of B windows, [B, native_len + 1] each."""

    tokens: Tokens
    kinds: Kinds


class Windows:
    """Windows, drawn at random from documents."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        library: Sequence[Tokens],
        tests: Sequence[Tokens],
        native_len: int,
        seed: int,
    ) -> None:
        self._pieces = Pieces(tokenizer)
        self._len = native_len + 1
        self._seed = seed
        self._vocab = tokenizer.get_vocab_size()
        self._sources = [_Source(library, self._len)]
        if tests:
            self._sources.append(_Source(tests, self._len))
        self._line_end = tokenizer.encode("\n").ids[0]
        self._ends_line = np.array(
            ["\n" in tokenizer.decode([token]) for token in range(self._vocab)]
        )

    def batch(self, step: int, count: int, mix: Mix) -> Batch:
        """Draw the `count` windows of a step."""
        rng = random.Random(f"{self._seed}-{step}")  # noqa: S311  not a secret
        windows = [self._window(rng, mix) for _ in range(count)]
        return Batch(
            np.array([window.tokens for window in windows]),
            np.array([window.kinds for window in windows], dtype=np.int64),
        )

    def _window(self, rng: random.Random, mix: Mix) -> Piece:
        kinds = {
            self.needles: mix.needles,
            self.chat: mix.chat,
            self.dense: mix.dense,
            self.repeats: mix.repeats,
        }
        natural = 1 - sum(kinds.values())
        make = rng.choices([*kinds, self.natural], [*kinds.values(), natural])[0]
        return self._whole(make(rng))

    def _whole(self, window: Piece) -> Piece:
        """Cut or pad a window to its length; padding does not count in the loss."""
        missing = max(0, self._len - len(window))
        tokens = window.tokens[: self._len] + [EOS_ID] * missing
        return Piece(tokens, window.kinds[: self._len] + [Kind.IGNORED] * missing)

    def natural(self, rng: random.Random) -> Piece:
        return _joined([_BOS, _text(self._code(rng, self._len - 1))])

    def needles(self, rng: random.Random) -> Piece:
        """Place one to four definitions in a document, with questions after them or at the end."""
        return self._hidden(rng, rng.choice([1, 1, 2, 3, 4]), rng.randrange(1, 5))

    def dense(self, rng: random.Random) -> Piece:
        """Place many definitions and questions, half of the time without text between them."""
        if rng.random() < 0.5:
            count = rng.randrange(3, max(4, self._len // 36))
            return self._hidden(rng, count, self._len // 36)
        form = rng.choice(FORMS)
        count = rng.randrange(2, max(3, self._len // 28))
        needles = self._pieces.needles(rng, count, form)
        definitions = [self._pieces.definition(needle) for needle in needles]
        asked = rng.choices(needles, k=self._len // 12)
        return _joined([_BOS, *definitions, *(self._pieces.question(each) for each in asked)])

    def _hidden(self, rng: random.Random, num_needles: int, num_questions: int) -> Piece:
        one_form = rng.choice(FORMS) if rng.random() < 0.5 else None
        needles = self._pieces.needles(rng, num_needles, one_form)
        definitions = [self._pieces.definition(needle) for needle in needles]
        questions = [self._pieces.question(rng.choice(needles)) for _ in range(num_questions)]
        room = self._len - 1 - _total(definitions)
        while _total(questions) > room:
            questions.pop()
        text = self._lines(rng, room - _total(questions))
        cuts = self._line_ends(text)
        places = sorted(rng.choice(cuts) for _ in definitions)
        behind = [cut for cut in cuts if cut >= places[-1]]
        asked_at = sorted(
            len(text) if rng.random() < _QUESTION_AT_END else rng.choice(behind) for _ in questions
        )
        placed = [*zip(places, definitions, strict=True), *zip(asked_at, questions, strict=True)]
        return _joined([_BOS, *_woven(text, placed)])

    def chat(self, rng: random.Random) -> Piece:
        """Build a user's text with definitions, and questions whose answers are only the value."""
        needles = self._pieces.needles(rng, rng.choice([1, 1, 2, 3]))
        definitions = [self._pieces.definition(needle) for needle in needles]
        turns = []
        for number in range(rng.randrange(1, 4)):
            mark = [self._pieces.turn()] if number else []
            turns += [*mark, self._pieces.chat_question(rng, rng.choice(needles))]
        room = self._len - 2 - _total(definitions) - _total(turns)
        text = self._lines(rng, rng.randrange(1, room) if rng.random() < 0.3 else room)
        cuts = self._line_ends(text)
        placed = [(rng.choice(cuts), definition) for definition in definitions]
        placed.sort(key=lambda each: each[0])
        return _joined([_BOS, self._pieces.turn(), *_woven(text, placed), *turns])

    def repeats(self, rng: random.Random) -> Piece:
        """Repeat a random segment, sometimes with code between, to train induction."""
        length = round(math.exp(rng.uniform(math.log(6), math.log(self._len * 0.45))))
        low = len(SPECIAL_TOKENS)
        segment = [rng.randrange(low, self._vocab) for _ in range(length)]
        with_code = rng.random() < 0.3
        again = [Kind.IGNORED] + [Kind.REPEAT] * (length - 1)
        parts = [_BOS, Piece(segment, [Kind.IGNORED] * length)]
        while _total(parts) < self._len:
            if with_code:
                parts.append(_text(self._code(rng, rng.randrange(1, self._len // 6))))
            parts.append(Piece(segment, again))
        return _joined(parts)

    def _code(self, rng: random.Random, length: int) -> Tokens:
        is_test = len(self._sources) > 1 and rng.random() < _TESTS_SHARE
        return self._sources[is_test].stretch(rng, length)

    def _lines(self, rng: random.Random, length: int) -> Tokens:
        """Draw a stretch of `length` tokens, the last of which is a line break."""
        return np.append(self._code(rng, length - 1), self._line_end)

    def _line_ends(self, text: Tokens) -> list[int]:
        """Return the places for an inserted line: the start, and after every line."""
        return [0, *(int(at) + 1 for at in np.nonzero(self._ends_line[text])[0])]


class _Source:
    """Documents of a window's length or more, drawn in proportion to their lengths."""

    def __init__(self, documents: Sequence[Tokens], at_least: int) -> None:
        self._documents = [each for each in documents if len(each) >= at_least]
        self._cumulative = np.cumsum([len(each) for each in self._documents])

    def stretch(self, rng: random.Random, length: int) -> Tokens:
        """Draw `length` successive tokens of one document."""
        at = rng.randrange(int(self._cumulative[-1]))
        document = self._documents[int(np.searchsorted(self._cumulative, at, side="right"))]
        last = len(document) - length
        draw = rng.random()
        start = rng.randrange(last + 1)
        if draw < _AT_START:
            start = 0
        elif draw < _AT_START + _AT_END:
            start = last
        return document[start : start + length]


_BOS = Piece([BOS_ID], [Kind.IGNORED])


def _text(tokens: Tokens) -> Piece:
    return Piece(tokens.tolist(), [Kind.TEXT] * len(tokens))


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        [token for piece in pieces for token in piece.tokens],
        [kind for piece in pieces for kind in piece.kinds],
    )


def _total(pieces: Sequence[Piece]) -> int:
    return sum(len(piece) for piece in pieces)


def _woven(text: Tokens, placed: Sequence[tuple[int, Piece]]) -> list[Piece]:
    """Insert each piece before the token at its place; places must not decrease."""
    pieces, at = [], 0
    for place, piece in placed:
        pieces += [_text(text[at:place]), piece]
        at = place
    return [*pieces, _text(text[at:])]
