"""JSON piece by piece: the pieces are what `json.dumps` writes of the value."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.text.tools.json_pieces import MAX_DEPTH, GrowingText

TEXTS = st.text('ab"\\/\n\t\x01\x7fé🧶\u2028 {}[],:', max_size=8)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS).filter(
        lambda each: each not in (float("inf"), float("-inf"))
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=12,
)


def written(*pieces: str) -> tuple[str, str | None]:
    """The pieces of a text's value, joined, and the text behind it; None if it is no value."""
    text, found = GrowingText(), list[str]()
    value = text.value()
    for each in pieces:
        text.add(each)
        try:
            for piece in value:
                if piece is None:
                    break
                found.append(piece)
            else:
                break
        except ValueError:
            return "".join(found), None
    return "".join(found), text.left


@settings(deadline=None, max_examples=60)
@given(
    value=VALUES,
    is_ascii=st.booleans(),
    separators=st.sampled_from([(",", ":"), (" ,\n", "\t: ")]),
    data=st.data(),
)
def test_the_pieces_are_what_json_dumps_writes(
    value: Any, separators: tuple[str, str], data: st.DataObject, *, is_ascii: bool
) -> None:
    """Wherever the text is cut, however it is spaced and escaped, and with all of the rest."""
    text = json.dumps(value, ensure_ascii=is_ascii, separators=separators) + ",x"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4).map(sorted))
    found, rest = written(*(text[one:two] for one, two in pairwise([0, *cuts, len(text)])))
    assert found == json.dumps(value, ensure_ascii=False)
    assert rest is not None
    assert ",x".startswith(rest)
    assert written(*text)[0] == found


def test_a_repeated_name_keeps_its_first_value() -> None:
    """In inner objects, too, and whatever the other value holds."""
    text = '{"a":1,"b":[{"x":1,"x":[2,{"a":"}"}],"y":3}],"a":{"q":[1,"}"]},"c":2}'
    assert written(*text)[0] == '{"a": 1, "b": [{"x": 1, "y": 3}], "c": 2}'


def test_half_of_a_pair_of_surrogates_stays_an_escape() -> None:
    """UTF-8 cannot hold it; a whole pair is one character."""
    text = r'["\ud83e", "\ud83e\n", "\ud83eA", "\ud83e\uddf6"]'
    assert written(*text)[0] == r'["\ud83e", "\ud83e\n", "\ud83eA", "🧶"]'


@pytest.mark.parametrize(
    "text",
    [
        '{"a" 1}', "{a: 1}", "[1 2]", "[nul]", "[NaN]", "[01]", "[1e999]", r'["\x"]', '["\x01"]',
        "[1,]", '{"a": 1,}', "]", "[" * (MAX_DEPTH + 1), "[" + "1" * 5000 + "]",
    ],
)  # fmt: skip
def test_what_no_client_could_read_is_broken(text: str) -> None:
    """The pieces before the fault stay, alike wherever the text is cut."""
    found, rest = written(text)
    assert rest is None
    assert written(*text) == (found, None)
