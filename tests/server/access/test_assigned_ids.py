"""The identity that a router gives the answers to a request."""

import asyncio

import pytest

from ropewalk.server.access.assigned_ids import AssignedIds, Seeds, assign_ids, new_ids

TOLD = AssignedIds("0123456789abcdef" * 2, 1_700_000_000, 42)


def given(told: AssignedIds | None, num: int) -> list[int]:
    """The seeds of the answers to one request."""

    async def request() -> list[int]:
        if told is not None:
            assign_ids(told)
        seeds = Seeds()
        return [seeds.next() for _ in range(num)]

    return asyncio.run(request())


def test_assigned_ids_give_the_same_seeds_in_each_run() -> None:
    """Each answer has its own, and another seed gives others."""
    first = given(TOLD, 64)
    assert first == given(TOLD, 64)
    assert len(set(first)) == 64
    assert all(0 <= seed < 2**63 for seed in first)
    assert set(given(AssignedIds(TOLD.number, 1, 43), 64)).isdisjoint(first)


def test_other_answers_are_random() -> None:
    assert given(None, 3) != given(None, 3)


def test_a_header_is_read_as_it_was_written() -> None:
    for told in (TOLD, new_ids(1.5)):
        assert AssignedIds.of(told.header()) == told


@pytest.mark.parametrize(
    "header",
    ["", "a 1 1", f"{'A' * 32} 1 1", f"{'a' * 32} 1", f"{'a' * 32} -1 1", f"{'a' * 32} 1 1 "],
)
def test_a_malformed_header_is_none(header: str) -> None:
    assert AssignedIds.of(header) is None
