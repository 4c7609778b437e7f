"""The memory of a replica's pages is bounded, and forgets as the page pool evicts."""

from hypothesis import given
from hypothesis import strategies as st

from ropewalk.server.replicas.text_chunks import PageMemory
from tests.server.replicas.simulated import prompt_of


def test_the_least_recently_used_prefix_goes_first() -> None:
    """Room for two prefixes of three pages; the one that was used again stays."""
    memory = PageMemory(6)
    first, second, third = (prompt_of(number, 3).keys for number in range(3))
    for keys in (first, second, first, third):
        memory.note(keys)
    assert [memory.match(keys) for keys in (first, second, third)] == [3, 0, 3]


def test_the_end_of_a_prefix_goes_before_its_start() -> None:
    """A shortened prefix is still of use; one without its first page is not."""
    memory = PageMemory(4)
    first, second = prompt_of(1, 3).keys, prompt_of(2, 3).keys
    memory.note(first)
    memory.note(second)
    assert memory.match(first) == 1
    assert memory.match(second) == 3


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12))))
def test_the_memory_keeps_its_bound_after_anything(
    max_pages: int, notes: list[tuple[int, int]]
) -> None:
    """The newest prompt is known as far as the bound allows."""
    memory = PageMemory(max_pages)
    for prefix, num_pages in notes:
        keys = prompt_of(prefix, num_pages).keys
        others = set(memory._keys) - set(keys)
        expected = memory.num_evicted_by(keys)
        memory.note(keys)
        assert len(others - set(memory._keys)) == expected
        assert len(memory) <= max_pages
        assert memory.match(keys) == min(num_pages, max_pages)
