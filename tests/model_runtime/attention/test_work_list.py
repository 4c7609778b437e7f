"""The pieces of a decode step cover every key once, and no processor has much more than others."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.work_list import (
    Cut,
    Rows,
    WorkList,
    _placed,
    contexts_of,
    piece_tiles,
    refill,
    whole_contexts,
)
from ropewalk.rope import DualChunk, KeyMap, PositionMethod, ReRope, SelfExtend, Shifted, Sinks

TILE = 64
KEY_HEADS = 8
PROGRAMS = 264  # an H200 has 132 processors with two programs each
CUT = Cut(window=None, tile=TILE, num_places=PROGRAMS // KEY_HEADS)
CPU = torch.device("cpu")
contexts = st.lists(st.integers(1, 200_000), min_size=1, max_size=70)


def work_of(contexts: list[int], cut: Cut = CUT) -> WorkList:
    """The list of whole contexts with one query at their end."""
    return WorkList.of(whole_contexts(np.array(contexts) - 1, cut.window), cut, CPU)


def rows_of(positions: Sequence[int], tables: Sequence[int] = (), *, shared: Any = ()) -> Rows:
    """Rows at these positions, of table 0 and with pages of their own by default."""
    num_rows = len(positions)
    same_pages = np.array([*shared, *[False] * (num_rows - len(shared))], dtype=bool)
    table_ids = np.array([*tables, *[0] * (num_rows - len(tables))])
    return Rows(np.array(positions), table_ids, same_pages)


def tiles_of(entries_E4: Tensor) -> NDArray[np.int64]:
    """Tiles that each entry reads."""
    begin_E, end_E = entries_E4[:, 1].numpy(), entries_E4[:, 2].numpy()
    return np.where(begin_E < end_E, -(-end_E // TILE) - begin_E // TILE, 0)


def largest_load(work: WorkList) -> float:
    """The largest load of a program's place over the mean, entries dealt as a GPU deals them.

    A place takes the next program when its own ends. Programs of all key heads of an entry are
    neighbours.
    """
    tiles_E = tiles_of(work.entries_EF)
    loads = [0] * PROGRAMS
    for tiles in np.repeat(tiles_E, KEY_HEADS).tolist():
        heapq.heappush(loads, heapq.heappop(loads) + tiles)
    return max(loads) / (tiles_E.sum() * KEY_HEADS / PROGRAMS)


def check_order_and_slots(work: WorkList) -> dict[int, list[list[int]]]:
    """Check the order of the entries and their slots; return those with keys by sequence.

    An entry with keys is never behind one without, and never longer than the one before.
    """
    lens_E = (work.entries_EF[:, 2] - work.entries_EF[:, 1]).tolist()
    assert lens_E == sorted(lens_E, reverse=True)
    assert lens_E[-1] >= 0
    found: dict[int, list[list[int]]] = {}
    slots = []
    for entry in work.entries_EF.tolist():
        sequence, begin, end, slot, num_tokens = entry[:5]
        if begin < end:
            found.setdefault(sequence, []).append(entry)
            for nth in range(num_tokens):
                first, count = work.pieces_S2[sequence + nth].tolist()
                assert first <= slot + nth * count < first + count
                slots.append(slot + nth * count)
    assert len(slots) <= work.num_slots
    assert sorted(slots) == list(range(len(slots)))
    assert int(work.pieces_S2[:, 1].sum()) == len(slots)
    assert int(work.pieces_S2[:, 1].max()) <= work.most_pieces
    return found


@settings(deadline=None)
@given(contexts, st.sampled_from((None, 1, 63, 64, 700, 4096)))
def test_every_key_is_in_one_piece_of_bounded_length(
    contexts: list[int], window: int | None
) -> None:
    """A piece is at most the mean work of a place, or eight tiles."""
    work = work_of(contexts, CUT._replace(window=window))
    found = check_order_and_slots(work)
    for sequence, context in enumerate(contexts):
        first = at = max(0, context - window) if window else 0
        for _, begin, end, *_ in sorted(found[sequence]):
            assert begin == at
            assert begin == first or begin % TILE == 0
            at = end
        assert at == context
    tiles_E = tiles_of(work.entries_EF)
    assert tiles_E.max() <= max(8, -(-int(tiles_E.sum()) // CUT.num_places))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 9)), min_size=1, max_size=20),
    st.sampled_from((1, 2, 5, 16)),
    st.sampled_from((None, 1, 64, 700)),
    st.sampled_from(({}, {2: ReRope(100)})),
)
def test_tokens_of_one_sequence_read_its_pieces_together(
    runs: list[tuple[int, int]],
    most: int,
    window: int | None,
    methods: dict[int, PositionMethod],
) -> None:
    """Every token has all of its keys, and a run of n tokens reads them n / most times.

    Under a position method, which every third sequence has here, each token reads its own.
    """
    positions: list[int] = []
    tables: list[int] = []
    shared: list[bool] = []
    for number, (first, count) in enumerate(runs):
        positions += range(first, first + count)
        tables += [number % 3] * count
        shared += [False, *[True] * (count - 1)]
    cut = CUT._replace(window=window, most_tokens=most, has_methods=bool(methods))
    rows = rows_of(positions, tables, shared=shared)
    found = check_order_and_slots(WorkList.of(contexts_of(rows, cut, methods), cut, CPU, methods))
    at = 0
    for number, (first, count) in enumerate(runs):
        together = 1 if methods and number % 3 == 2 else most
        for nth in range(0, count, together):
            num_tokens = min(together, count - nth)
            pieces = sorted(found.pop(at + nth))
            assert {each[4] for each in pieces} == {num_tokens}
            assert pieces[0][1] == max(0, first + nth + 1 - window if window else 0)
            assert pieces[-1][2] == first + nth + num_tokens
            assert sum(each[2] - each[1] for each in pieces) == pieces[-1][2] - pieces[0][1]
        at += count
    assert not found


@pytest.mark.parametrize(
    ("positions", "tables", "shared"),
    [
        ([7, 8, 9], [], []),  # other pages
        ([7, 9, 8], [], [False, True, True]),  # a gap
        ([7, 8, 9], [0, 1, 0], [False, True, True]),  # other angles
        ([-1, 0, -1], [], [False, True, True]),  # behind a prompt that other kernels read
    ],
)
def test_other_rows_read_their_own_keys(
    positions: list[int], tables: list[int], shared: list[bool]
) -> None:
    rows = rows_of(positions, tables, shared=shared)
    contexts = contexts_of(rows, CUT._replace(most_tokens=4), {})
    assert contexts.num_tokens_S.tolist() == [1, 1, 1]


METHODS = (
    *(ReRope(100), SelfExtend(96, 3), SelfExtend(96, 48), SelfExtend(4096, 512)),
    *(DualChunk(1000, 40), DualChunk(160, 32), Shifted(700, 50), Sinks(4, 3000)),
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 50_000), min_size=1, max_size=12),
    st.sampled_from(METHODS),
    st.sampled_from((None, 1, 500, 4096)),
)
def test_pieces_carry_the_ranges_of_a_method(
    positions: list[int], method: PositionMethod, window: int | None
) -> None:
    """Every second sequence has no method. Each key is in one piece, at the position of its map."""
    cut = CUT._replace(window=window, has_methods=True)
    tables = np.arange(len(positions)) % 2
    contexts = contexts_of(rows_of(positions, tables), cut, {0: method})
    found = check_order_and_slots(WorkList.of(contexts, cut, CPU, {0: method}))
    for sequence, position in enumerate(positions):
        ranges = [(0, position + 1, position, KeyMap())]
        if sequence % 2 == 0:
            bounds = [map(int, each) for each in method.ranges(torch.tensor([position]))]
            ranges = [(*each, own) for each, own in zip(bounds, method.key_maps, strict=True)]
        pieces = iter(sorted(found.pop(sequence)))
        for first, stop, query, key_map in ranges:
            at = start = max(first, position + 1 - window if window else 0)
            while at < stop:
                _, begin, end, _, _, placed, period, modulus, divisor = next(pieces)
                assert (begin, placed) == (at, query)
                assert begin == start or begin % period % TILE == 0
                for index in (begin, end - 1):
                    expected = int(key_map.positions(torch.tensor(index)))
                    assert (index - index // period * modulus) // divisor == expected
                at = end
            assert at == max(start, stop)
        assert not [*pieces]
    assert not found


def test_a_piece_has_the_period_the_modulus_and_the_divisor_of_its_keys() -> None:
    maps = (
        KeyMap(),
        KeyMap(modulus=48),
        KeyMap(divisor=4),
        KeyMap(divisor=TILE),
        KeyMap(divisor=0),
    )
    found = [_placed(each, TILE) for each in maps]
    far = found[0][0]
    assert far > 200_000
    assert found == [(far, 0, 1), (48, 48, 1), (64, 0, 4), (TILE, 0, TILE), (far, 0, far)]


@pytest.mark.parametrize("page", [64, 128, 192, 320])
def test_no_tile_crosses_the_end_of_a_page_of_whole_tiles(page: int) -> None:
    """A tile then loads one page number. The divisors are those that fit the page."""
    divisors = [each for each in range(2, 4 * page + 1) if page % each == 0 or each % page == 0]
    for key_map in (*(KeyMap(divisor=each) for each in divisors), KeyMap(), KeyMap(divisor=0)):
        period, _, divisor = _placed(key_map, TILE)
        for start in range(0, 12 * page, min(period, TILE)):
            first = start // period * period + start % period // TILE * TILE
            last = min(first + TILE, (first // period + 1) * period) - 1
            assert first // page == last // page
            assert divisor < TILE or first // divisor == last // divisor
            assert divisor >= TILE or first % divisor == 0


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
        assert tiles_of(work_of([context] * count).entries_EF).max() == 8


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
    refill(lists, rows_of([130_000, 0, 700]))
    for cut, address in zip(cuts, addresses, strict=True):
        expected = work_of([130_001, 1, 701], cut)
        assert lists[cut].numbers.data_ptr() == address
        assert torch.equal(lists[cut].numbers, expected.numbers)
        assert torch.equal(lists[cut].entries_EF, expected.entries_EF)
        assert torch.equal(lists[cut].pieces_S2, expected.pieces_S2)
        assert int(expected.pieces_S2[:, 1].sum()) > 3 or cut.window


def test_sequences_without_a_single_query_have_no_piece() -> None:
    """A chunk of a prompt beside them is read by other kernels."""
    work = WorkList.of(whole_contexts(np.array([-1, 2000, -1]), None), CUT, CPU)
    assert set(work.entries_EF[:4, 0].tolist()) == {1}
    assert work.pieces_S2.tolist() == [[0, 0], [0, 4], [4, 0]]
