"""Read text that grows, and JSON in it: a value in the form of `json.dumps`, piece by piece.

Readers are generators. They yield the pieces of their result, and None where more text must come.
A wrong text raises ValueError. A name that an object has twice is kept once, with its first value,
because a piece cannot be taken back. Python's quotes, words and tuples are read like JSON's.
"""

import json
import re
from collections.abc import Collection, Generator
from typing import Any, TypeVar

# Clients read arguments with jiter, which refuses more.
MAX_DEPTH = 200
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # first half of a character beyond 16 bits
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_ESCAPE = re.compile(rf"""{_HIGH}{_LOW}|\\(?:["'\\/bfnrt]|u[0-9a-fA-F]{{4}})""")
_ESCAPE_SO_FAR = re.compile(rf"(?:{_HIGH})?(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?\Z")
_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER_OR_NAME = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null"
)
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

T = TypeVar("T")
Waiting = Generator[None, None, T]
Pieces = Generator[str | None, None, None]


class GrowingText:
    """Text of a model, which comes in pieces of any size, and its readers."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # the readers have read up to here
        self.has_moved = False  # something but space has been read

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    @property
    def left(self) -> str:
        return self._text[self._at :]

    def _move(self, end: int) -> str:
        start, self._at, self.has_moved = self._at, end, True
        return self._text[start:end]

    def next_char(self) -> Waiting[str]:
        """Return the next character that is no space. It stays unread."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            yield None

    def begins_with(self, text: str) -> Waiting[bool]:
        """Return whether a text comes next. It stays unread."""
        while self._at + len(text) > len(self._text) and text.startswith(self.left):
            yield None
        return self._text.startswith(text, self._at)

    def any_of(self, *texts: str) -> Waiting[str]:
        """Read the one of these texts that comes next, after space; return "" if none does."""
        while True:
            yield from self.next_char()
            for each in texts:
                if self._text.startswith(each, self._at):
                    return self._move(self._at + len(each))
            if not any(each.startswith(self._text[self._at :]) for each in texts):
                return ""
            yield None

    def one_of(self, *texts: str) -> Waiting[str]:
        """Read the one of these texts that comes next, after space."""
        found = yield from self.any_of(*texts)
        if not found:
            raise ValueError(f"none of {texts}")
        return found

    def word(self, pattern: re.Pattern[str], known: Collection[str] | None = None) -> Waiting[str]:
        """Read the longest word of a pattern, after space. `known`: it must be one of these."""
        yield from self.next_char()
        while (found := pattern.match(self._text, self._at)) is not None:
            may_be = known is None or any(each.startswith(found[0]) for each in known)
            if not may_be or found.end() < len(self._text):
                break
            yield None
        if found is None or (known is not None and found[0] not in known):
            raise ValueError("another word")
        return self._move(found.end())

    def until(self, close: str) -> Waiting[str]:
        """Read up to a text and over it; return what is before it."""
        num_searched = 0
        while (end := self._text.find(close, self._at + num_searched)) < 0:
            num_searched = max(0, len(self._text) - self._at - len(close) + 1)
            yield None
        return self._move(end + len(close))[: -len(close)]

    def value(self, before: str = "", depth: int = 0) -> Pieces:
        """Read a value. `before`: what separates it from the piece before."""
        char = yield from self.next_char()
        if char in "\"'":
            yield from self.string(before)
        elif char not in "{[(":
            word = yield from self.word(_WORD)
            word = PYTHON_WORDS.get(word, word)
            if not _NUMBER_OR_NAME.fullmatch(word):
                raise ValueError("no value")
            yield before + json_text(json.loads(word))
        elif depth == MAX_DEPTH:
            raise ValueError("too deep")
        elif self._move(self._at + 1) == "{":
            yield before + "{"
            yield from self._members(depth + 1)
        else:
            yield before + "["
            yield from self._items({"[": "]", "(": ")"}[char], depth + 1)

    def _members(self, depth: int) -> Pieces:
        names = set[str]()
        is_over = bool((yield from self.any_of("}")))
        while not is_over:
            name = json.loads((yield from joined(self.string())))
            is_new, before = name not in names, ", " if names else ""
            if is_new:
                names.add(name)
                yield f"{before}{json_text(name)}: "
            yield from self.one_of(":")
            if is_new:
                yield from self.value(depth=depth)
            else:
                yield from joined(self.value(depth=depth))
            is_over = (yield from self.one_of(",", "}")) == "}"
        yield "}"

    def _items(self, close: str, depth: int) -> Pieces:
        before = ""
        is_over = bool((yield from self.any_of(close)))
        while not is_over:
            yield from self.value(before, depth)
            before = ", "
            is_over = (yield from self.one_of(",", close)) == close
        yield "]"

    def string(self, before: str = "") -> Pieces:
        """Read a string. `before`: as of a value."""
        quote = yield from self.one_of('"', "'")
        yield before + '"'
        while not self._text.startswith(quote, self._at):
            if plain := _PLAIN[quote].match(self._text, self._at):
                yield self._move(plain.end()).replace('"', '\\"')
            elif _ESCAPE_SO_FAR.match(self._text, self._at):
                yield None
            elif escape := _ESCAPE.match(self._text, self._at):
                text = self._move(escape.end()).replace("\\'", "'")
                yield json_text(json.loads(f'"{text}"'))[1:-1]
            else:
                raise ValueError("no character of a string")
        self._move(self._at + 1)
        yield '"'


def joined(pieces: Pieces) -> Waiting[str]:
    """Return all pieces as one text."""
    found = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            found.append(piece)
    return "".join(found)


def json_text(value: Any) -> str:
    """Return JSON in the way of OpenAI. Raises ValueError for NaN and infinities.

    Half of a pair of surrogates, which UTF-8 cannot hold, stays an escape.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
