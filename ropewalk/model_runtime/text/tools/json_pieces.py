"""JSON as it grows: a value in the form of `json.dumps`, piece by piece.

A name that an object has twice is kept once, with its first value, because a piece cannot be taken
back.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Clients read arguments with jiter, which refuses more.
MAX_DEPTH = 200
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_SO_FAR = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_FIRST_HALF = re.compile(r"\\u[dD][89abAB]")  # of a character beyond 16 bits
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER_OR_NAME = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null"
)


class _Next(Enum):
    """The token that has to follow."""

    VALUE = 1
    VALUE_OR_END = 2
    NAME = 3
    NAME_OR_END = 4
    COLON = 5
    COMMA_OR_END = 6
    INSIDE_A_STRING = 7


@dataclass(slots=True)
class _Container:
    """An object or a list that is not closed yet."""

    names: set[str] | None  # of an object, so far; None: a list
    num_written: int = 0


class JsonPieces:
    """A writer of one value. Text of a model goes in, in pieces of any size."""

    def __init__(self) -> None:
        self._left = ""  # text whose end is not known yet
        self._open: list[_Container] = []
        self._next = _Next.VALUE
        self._pieces: list[str] = []
        self._skips_in: int | None = None  # the depth of an object whose member is left out
        self.rest: str | None = None  # the text behind the value; None: the value goes on
        self.is_broken = False  # the text is no JSON from `rest` on

    def feed(self, text: str) -> str:
        """Return what more text adds to the value."""
        self._left += text
        at = 0
        try:
            while self.rest is None and (end := self._token(at)) > at:
                at = end
        except ValueError:
            self.is_broken, self.rest = True, self._left[at:]
        if self.rest is None:
            self._left = self._left[at:]
        found, self._pieces = "".join(self._pieces), []
        return found

    def _token(self, at: int) -> int:
        """Read the token at a place of the text; return its end, or `at` if it is not whole."""
        if self._next is _Next.INSIDE_A_STRING:
            return self._in_string(at)
        start = self._end_of_space(at)
        if start == len(self._left):
            return at
        char = self._left[start]
        if self._next is _Next.COLON:
            self._expect(char, ":")
            self._next = _Next.VALUE
        elif self._next is _Next.COMMA_OR_END and char == ",":
            self._next = _Next.VALUE if self._open[-1].names is None else _Next.NAME
        elif self._next in _MAY_END and self._open and char == self._closing():
            self._open.pop()
            self._write(char)
            self._end_value(start + 1)
        elif self._next in {_Next.NAME, _Next.NAME_OR_END}:
            self._expect(char, '"')
            return self._name(at, start)
        elif self._next in {_Next.VALUE, _Next.VALUE_OR_END}:
            return self._value(at, start)
        else:
            raise ValueError("no comma")
        return start + 1

    def _value(self, at: int, start: int) -> int:
        char = self._left[start]
        if char in '{["':
            self._begin_item()
            self._write(char)
            if char == '"':
                self._next = _Next.INSIDE_A_STRING
                return start + 1
            if len(self._open) == MAX_DEPTH:
                raise ValueError("too deep")
            self._open.append(_Container(set() if char == "{" else None))
            self._next = _Next.NAME_OR_END if char == "{" else _Next.VALUE_OR_END
            return start + 1
        word = _WORD.match(self._left, start)
        if word is not None and word.end() == len(self._left):
            return at  # it may go on
        if word is None or not _NUMBER_OR_NAME.fullmatch(word[0]):
            raise ValueError("no value")
        self._begin_item()
        self._write(json_text(json.loads(word[0])))
        self._end_value(word.end())
        return word.end()

    def _name(self, at: int, start: int) -> int:
        whole = _STRING.match(self._left, start)
        if whole is None:
            return at
        name, names = json.loads(whole[0]), self._open[-1].names
        assert names is not None
        if name not in names:
            names.add(name)
            self._begin_item(is_name=True)
            self._write(f"{json_text(name)}: ")
        elif self._skips_in is None:
            self._skips_in = len(self._open)
        self._next = _Next.COLON
        return whole.end()

    def _in_string(self, at: int) -> int:
        plain = _PLAIN.match(self._left, at)
        if plain is not None:
            self._write(plain[0])
            return plain.end()
        if at == len(self._left):
            return at
        if self._left[at] == '"':
            self._write('"')
            self._end_value(at + 1)
            return at + 1
        if _ESCAPE_SO_FAR.match(self._left, at):
            return at
        escaped = _ESCAPE.match(self._left, at)
        if escaped is None:
            raise ValueError("no character of a string")
        end = escaped.end()
        if _FIRST_HALF.match(escaped[0]):
            if end == len(self._left) or _ESCAPE_SO_FAR.match(self._left, end):
                return at
            other = _ESCAPE.match(self._left, end)
            if other is not None and len(other[0]) == len(escaped[0]):
                end = other.end()
        self._write(json_text(json.loads(f'"{self._left[at:end]}"'))[1:-1])
        return end

    def _end_of_space(self, at: int) -> int:
        space = _SPACE.match(self._left, at)
        assert space is not None
        return space.end()

    def _begin_item(self, *, is_name: bool = False) -> None:
        """Separate an item of a list, or a member of an object, from the one before."""
        if not self._open or (self._open[-1].names is not None) != is_name:
            return
        if self._skips_in is None:
            if self._open[-1].num_written:
                self._write(", ")
            self._open[-1].num_written += 1

    def _end_value(self, end: int) -> None:
        if self._skips_in == len(self._open):
            self._skips_in = None
        self._next = _Next.COMMA_OR_END
        if not self._open:
            self.rest = self._left[end:]

    def _closing(self) -> str:
        return "]" if self._open[-1].names is None else "}"

    def _write(self, text: str) -> None:
        if self._skips_in is None:
            self._pieces.append(text)

    @staticmethod
    def _expect(char: str, expected: str) -> None:
        if char != expected:
            raise ValueError(f"no {expected}")


_MAY_END = {_Next.VALUE_OR_END, _Next.NAME_OR_END, _Next.COMMA_OR_END}


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
