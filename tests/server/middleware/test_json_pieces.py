"""A large body is decoded in pieces, with the values and the mistakes of Python's own decoder."""

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.server.middleware import json_pieces
from ropewalk.server.strict_json import TwiceError

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text('\\"u/\n\ud83d\ude00\u1234', max_size=9)
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


def decoded(text: str, piece: int) -> Any:
    """The value of a text that is read in pieces of so many characters, or what is wrong, where."""
    with patch.object(json_pieces, "_PIECE", piece):
        try:
            return json_pieces.decode_in_pieces(text.encode("utf-8", "surrogatepass"))
        except json.JSONDecodeError as error:
            return error.msg, error.pos


@given(
    value=_TREES,
    piece=st.integers(12, 20),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
)
def test_the_value_is_that_of_pythons_decoder_wherever_a_piece_ends(
    value: Any, piece: int, indent: int | None, *, is_ascii: bool
) -> None:
    """Halves of characters, escapes and numbers may be cut anywhere."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert decoded(text, piece) == json.loads(text)


@given(value=_TREES, piece=st.integers(12, 20), data=st.data())
def test_a_mistake_is_found_where_pythons_decoder_finds_it(
    value: Any, piece: int, data: st.DataObject
) -> None:
    """One character is added, or takes the place of another."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from('[]{},:"\\u0 x1-.')) + text[at + 1 :]
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        expected = error.msg, error.pos
    try:
        assert decoded(text, piece) == expected
    except TwiceError as error:  # a changed name
        assert error.name in text  # noqa: PT017  # which of both it is, is drawn


@pytest.mark.parametrize("name", ["k3", "k99"])
def test_a_name_that_an_object_has_twice_is_found_in_pieces(name: str) -> None:
    """The two are in different pieces."""
    text = json.dumps({f"k{n}": n for n in range(100)})[:-1] + f', "{name}": 0}}'
    with patch.object(json_pieces, "_PIECE", 16), pytest.raises(TwiceError, match=name):
        json_pieces.decode_in_pieces(text.encode())
