"""The pieces of a decode step cover every key once, and no processor has much more than others."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from model_runtime.work_list import Cut, WorkList, piece_tiles, refill, whole_bounds

TILE = 64
KEY_HEADS = 8
PROGRAMS = 264  # an H200 has 132 processors with two programs each
CUT = Cut(window=None, tile=TILE, num_places=PROGRAMS // KEY_HEADS)
CPU = torch.device("cpu")
contexts = st.lists(st.integers(1, 200_000), min_size=1, max_size=70)


def work_of(contexts: list[int], cut: Cut = CUT) -> WorkList:
    """The list of whole contexts with one query at their end."""
    return WorkList.of(*whole_bounds(np.array(contexts) - 1, cut.window), cut, CPU)


def tiles_of(entries_E4: Tensor) -> NDArray[np.int64]:
    """Tiles that each entry reads."""
    begin_E, end_E = entries_E4[:, 1].numpy(), entries_E4[:, 2].numpy()
    return np.where(begin_E < end_E, -(-end_E // TILE) - begin_E // TILE, 0)


def largest_load(work: WorkList) -> float:
    """The largest load of a program's place over the mean, entries dealt as a GPU deals them.

    A place takes the next program when its own ends. Programs of all key heads of an entry are
    neighbours.
    """
    tiles_E = tiles_of(work.entries_RE4[0])
    loads = [0] * PROGRAMS
    for tiles in np.repeat(tiles_E, KEY_HEADS).tolist():
        heapq.heappush(loads, heapq.heappop(loads) + tiles)
    return max(loads) / (tiles_E.sum() * KEY_HEADS / PROGRAMS)


def check_cover(work: WorkList, begin_RS: NDArray[np.int64], end_RS: NDArray[np.int64]) -> None:
    """Check that each range is cut into the pieces of its sequence, at tiles, in slots of its own.

    An entry with keys is never behind one without, and never longer than the one before.
    """
    slots = []
    for entries_E4, begin_S, end_S in zip(work.entries_RE4, begin_RS, end_RS, strict=True):
        lens_E = (entries_E4[:, 2] - entries_E4[:, 1]).tolist()
        assert lens_E == sorted(lens_E, reverse=True)
        assert lens_E[-1] >= 0
        found: dict[int, list[tuple[int, int]]] = {}
        for sequence, begin, end, slot in entries_E4.tolist():
            if begin < end:
                found.setdefault(sequence, []).append((begin, end))
                first, count = work.pieces_S2[sequence].tolist()
                assert first <= slot < first + count
                slots.append(slot)
        for sequence in range(begin_RS.shape[1]):
            at = int(begin_S[sequence])
            for begin, end in sorted(found.pop(sequence, [])):
                assert begin == at
                assert begin == begin_S[sequence] or begin % TILE == 0
                at = end
            assert at == max(int(end_S[sequence]), int(begin_S[sequence]))
        assert not found
    assert sorted(slots) == list(range(len(slots)))
    assert int(work.pieces_S2[:, 1].sum()) == len(slots)
    assert int(work.pieces_S2[:, 1].max()) <= work.most_pieces


@settings(deadline=None)
@given(contexts, st.sampled_from((None, 1, 63, 64, 700, 4096)))
def test_every_key_is_in_one_piece_of_bounded_length(
    contexts: list[int], window: int | None
) -> None:
    """A piece is at most the mean work of a place, or eight tiles."""
    work = work_of(contexts, CUT._replace(window=window))
    bounds = whole_bounds(np.array(contexts) - 1, window)
    check_cover(work, *bounds)
    tiles_E = tiles_of(work.entries_RE4[0])
    assert tiles_E.max() <= max(8, -(-int(tiles_E.sum()) // CUT.num_places))


@settings(deadline=None)
@given(st.data())
def test_ranges_of_a_sequence_have_neighbouring_slots(data: st.DataObject) -> None:
    """Some ranges hold no key, as a sequence's range in a step of several ranges may."""
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    numbers = st.integers(0, 30_000)
    begin_RS, length_RS = (
        np.array([[data.draw(numbers) for _ in range(shape[1])] for _ in range(shape[0])])
        for _ in range(2)
    )
    end_RS = begin_RS + np.where(length_RS % 3 == 0, 0, length_RS)
    check_cover(WorkList.of(begin_RS, end_RS, CUT, CPU), begin_RS, end_RS)


@settings(deadline=None)
@given(contexts)
def test_random_lengths_are_balanced(contexts: list[int]) -> None:
    """A place has at most its share and one piece, since long pieces come first."""
    tiles_S = -(-np.array(contexts) // TILE)
    share = tiles_S.sum() / CUT.num_places
    assert largest_load(work_of(contexts)) <= 1 + piece_tiles(tiles_S, CUT.num_places) / share


def test_one_long_context_beside_short_ones_is_balanced() -> None:
    """With one program for a context and key head, the largest load would be 26 times the mean."""
    assert largest_load(work_of([131_072, *[1024] * 31])) < 1.05
    assert largest_load(work_of([*[131_072] * 8, *[1024] * 7])) < 1.02


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 128, 256])
@pytest.mark.parametrize("context", [8192, 32_768, 131_072])
def test_equal_contexts_are_balanced(count: int, context: int) -> None:
    """In numbers that do not divide the device, contexts are cut finer; at least eight tiles."""
    if count * context >= 8 * TILE * CUT.num_places:
        assert largest_load(work_of([context] * count)) < (1.05 if count <= 2 else 1.2)
    else:
        assert tiles_of(work_of([context] * count).entries_RE4[0]).max() == 8


def test_equal_contexts_in_any_number_are_nearly_balanced() -> None:
    """Without a cut, 67 contexts on 33 places would be 1.5 times the mean."""
    loads = [largest_load(work_of([32_768] * count)) for count in range(1, 257)]
    assert max(loads) < 1.35
    assert sorted(loads)[128] < 1.08


def test_short_contexts_are_not_cut() -> None:
    """Eight tiles are one piece, even if most of the device has nothing to do."""
    work = work_of([8 * TILE, 1])
    assert work.pieces_S2[:, 1].tolist() == [1, 1]
    assert work_of([8 * TILE + 1]).pieces_S2[:, 1].tolist() == [2]


def test_a_list_is_filled_again_where_it_is() -> None:
    """A captured step reads it at one address, with other lengths in each replay."""
    cuts = [CUT, CUT._replace(window=100)]
    lists = {cut: work_of([1, 1, 1], cut) for cut in cuts}
    addresses = [work.numbers.data_ptr() for work in lists.values()]
    refill(lists, np.array([130_000, 0, 700]))
    for cut, address in zip(cuts, addresses, strict=True):
        expected = work_of([130_001, 1, 701], cut)
        assert lists[cut].numbers.data_ptr() == address
        assert torch.equal(lists[cut].numbers, expected.numbers)
        assert torch.equal(lists[cut].entries_RE4, expected.entries_RE4)
        assert torch.equal(lists[cut].pieces_S2, expected.pieces_S2)
        assert int(expected.pieces_S2[:, 1].sum()) > 3 or cut.window


def test_sequences_without_a_single_query_have_no_piece() -> None:
    """A chunk of a prompt beside them is read by other kernels."""
    work = WorkList.of(*whole_bounds(np.array([-1, 2000, -1]), None), CUT, CPU)
    assert set(work.entries_RE4[0][:4, 0].tolist()) == {1}
    assert work.pieces_S2.tolist() == [[0, 0], [0, 4], [4, 0]]
