"""Depth and values of a JSON text are those of the objects that Python makes of it."""

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.server.middleware import large_bodies as json_shape
from ropewalk.server.middleware.large_bodies import JsonShape

_LEAVES = st.none() | st.booleans() | st.integers() | st.text('"\\[]{},:a\u00e9', max_size=8)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('"\\[,{a'), inner),
    max_leaves=30,
)


def shape_of(value: Any) -> tuple[int, int, int]:
    """The depth, the values that are no numbers, and the commas."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, 0, 0
    if not isinstance(value, list | dict):
        return 0, 1, 0
    parts = list(value.values()) if isinstance(value, dict) else value
    shapes = [shape_of(each) for each in parts]
    depth = 1 + max((depth for depth, _, _ in shapes), default=0)
    names = len(value) if isinstance(value, dict) else 0
    values = 1 + names + sum(count for _, count, _ in shapes)
    return depth, values, max(0, len(parts) - 1) + sum(commas for _, _, commas in shapes)


def exceeds(text: bytes, depth: int, values: int, numbers: int, window: int) -> str | None:
    """The limit that a text exceeds if the engine sees `window` bytes at a time."""
    with patch.object(json_shape, "_WINDOW", window):
        return JsonShape(depth, values, numbers).exceeds(text, len(text))


@given(
    value=_TREES,
    window=st.integers(2, 9),
    indent=st.sampled_from([None, 2]),
    is_ascii=st.booleans(),
)
def test_the_limits_are_exact_wherever_a_window_ends(
    value: Any, window: int, indent: int | None, *, is_ascii: bool
) -> None:
    """Strings hold brackets, commas, quotes and backslashes, which may be cut anywhere."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode()
    depth, values, commas = shape_of(value)
    assert exceeds(text, depth, values, commas, window) is None
    if depth:
        assert exceeds(text, depth - 1, values, commas, window) == "depth"
    if values:
        assert exceeds(text, depth, values - 1, commas, window) == "values"
    if commas:
        assert exceeds(text, depth, values, commas - 1, window) == "numbers"


@given(st.binary(max_size=40), st.integers(2, 9))
def test_any_bytes_have_an_end(text: bytes, window: int) -> None:
    """A text that is no JSON is counted, too, and is refused later."""
    assert exceeds(text, 100, 100, 100, window) == exceeds(text, 100, 100, 100, 1000)


@pytest.mark.parametrize("text", [b'"', b'"\\', b'["\\"', b"\\", b'"a\\\\\\'])
def test_a_string_without_its_end_is_counted(text: bytes) -> None:
    """The last byte may be a backslash without what it escapes."""
    for window in (2, 3, 1000):
        assert exceeds(text, 9, 9, 9, window) is None
