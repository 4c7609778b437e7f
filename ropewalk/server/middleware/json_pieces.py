"""Decode a large JSON text in pieces, so that other threads get the interpreter in between.

Python's own decoder is one call of C: it keeps the interpreter for 120 ms if a list has a million
numbers, for 40 ms if a text has 16 MB, and for 500 ms if an object has half a million names. Here
it gets numbers and texts in pieces, and Python walks through everything else.
"""

import codecs
import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in typeshed
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from ropewalk.server.strict_json import object_of

_PIECE = 16384  # characters, bytes or names; a call for so many takes less than a millisecond
_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?"
_NUMBERS = re.compile(rf"(?:{_SPACE.pattern}{_NUMBER}{_SPACE.pattern},)++")
# Whole escapes. A first half of a character is one with its second, which may be behind the piece.
_SECOND = r"[dD][c-fC-F]"
_FIRST_HALF = rf"\\u[dD][89abAB]..(?:\\u{_SECOND}..|(?=[^\\]|\\[^u]|\\u(?!{_SECOND})..))"
_CHARACTERS = re.compile(rf'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])....|{_FIRST_HALF})*+', re.DOTALL)
_NUMBERS_DECODER = json.JSONDecoder()


def decode_in_pieces(body: bytes) -> Any:
    """Return the value of a JSON text. Raises JSONDecodeError, UnicodeDecodeError or TwiceError."""
    decoder = codecs.getincrementaldecoder(json.detect_encoding(body))("surrogatepass")
    starts = range(0, len(body), _PIECE)
    pieces = [decoder.decode(body[start : start + _PIECE]) for start in starts]
    return _Decoder().decode("".join(pieces) + decoder.decode(b"", final=True))


class _Decoder(json.JSONDecoder):
    """A decoder for one text."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object)
        self.parse_array = _array
        self.parse_string = _string
        self.scan_once = py_make_scanner(self)  # the one of C does not use the two


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object. Raises TwiceError."""
    if len(pairs) <= _PIECE:
        return object_of(pairs)
    found: dict[str, Any] = {}
    for start in range(0, len(pairs), _PIECE):
        found.update(pairs[start : start + _PIECE])
    return found if len(found) == len(pairs) else object_of(pairs)


def _array(text_and_start: tuple[str, int], scan_once: Any) -> tuple[list[Any], int]:
    """Return a list and the index behind it, from the index behind its bracket."""
    text, at = text_and_start
    values: list[Any] = []
    at = _behind_space(text, at)
    if text[at : at + 1] == "]":
        return values, at + 1
    while True:
        while run := _NUMBERS.match(text, at, at + _PIECE):
            values += _NUMBERS_DECODER.decode(f"[{run[0][:-1]}]")
            at = run.end()
        try:
            value, at = scan_once(text, _behind_space(text, at))
        except StopIteration as error:
            raise json.JSONDecodeError("Expecting value", text, error.value) from None
        values.append(value)
        at = _behind_space(text, at)
        if text[at : at + 1] == "]":
            return values, at + 1
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at += 1


def _string(text: str, start: int, strict: bool) -> tuple[str, int]:  # noqa: FBT001  # as json calls it
    """Return a text and the index behind it, from the index behind its quote."""
    pieces, at = [], start
    try:
        while True:
            found = _CHARACTERS.match(text, at, at + _PIECE)
            assert found is not None  # it matches nothing, too
            end = found.end()
            if end == at or text[end : end + 1] == '"':
                break
            pieces.append(scanstring(text[at:end] + '"', 0, strict)[0])
            at = end
        last, end = scanstring(text, at, strict)
    except json.JSONDecodeError as error:
        if error.doc is not text:
            at += error.pos
        else:  # an end that is missing is a mistake of the whole text
            at = start - 1 if error.pos < at else error.pos
        raise json.JSONDecodeError(error.msg, text, at) from None
    return "".join((*pieces, last)), end


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()
