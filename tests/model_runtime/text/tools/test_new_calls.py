"""Calls that an answer has made before are left out, whatever the pieces they come in."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.text.tools.call_stream import (
    CallEnd,
    CallEvent,
    CallPiece,
    CallStart,
    NewCalls,
)

CALL = st.tuples(st.sampled_from("fg"), st.lists(st.sampled_from(["", "a", "b", "ab"]), max_size=4))


def events(name: str, pieces: list[str]) -> list[CallEvent]:
    """Return the events of one call."""
    return [CallStart(name), *map(CallPiece, pieces), CallEnd()]


@given(st.lists(CALL, max_size=6))
def test_exactly_the_first_of_equal_calls_passes(calls: list[tuple[str, list[str]]]) -> None:
    """A set of the whole calls is the reference."""
    reader, known, expected = NewCalls(), set[tuple[str, str]](), list[CallEvent]()
    passed = [each for call in calls for event in events(*call) for each in reader.passed(event)]
    for name, pieces in calls:
        if (name, "".join(pieces)) not in known:
            known.add((name, "".join(pieces)))
            expected += events(name, pieces)
    assert passed == expected
    assert reader.num_repeated == len(calls) - len(known)


@pytest.mark.alone
def test_a_long_repeated_call_costs_its_length() -> None:
    """A comparison of all pieces with each new one took nine seconds."""
    reader, pieces = NewCalls(), ["ab"] * 60_000
    began = time.process_time()
    for event in events("f", pieces) * 2:
        reader.passed(event)
    assert time.process_time() - began < 2
    assert reader.num_repeated == 1
