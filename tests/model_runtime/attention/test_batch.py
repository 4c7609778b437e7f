"""The flat tensors of a step agree with its sequences, token by token."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.attention.batch import PageRow, PageTable, Span, build_batch

PAGE_SIZE = 4


def test_every_token_is_where_its_sequence_has_it() -> None:
    """A prompt, a chunk and a decode step are compared with a loop over tokens."""
    spans = [
        Span([5, 6, 7, 8, 9], 0, [3, 1], 2, range(4, 5)),
        Span([10, 11, 12], 6, [7, 0, 9], 0, range(0)),
        Span([13], 20, [2, 4, 6, 8, 10, 12, 14], 1, [0]),
    ]
    batch = build_batch(spans, PAGE_SIZE, torch.device("cpu"))
    tokens = [(span, at) for span in spans for at in range(len(span.token_ids))]
    positions = [span.first_position + at for span, at in tokens]
    assert batch.token_ids_1T.tolist() == [[span.token_ids[at] for span, at in tokens]]
    assert batch.position_ids_1T.tolist() == [positions]
    pages = [span.pages[(span.first_position + at) // PAGE_SIZE] for span, at in tokens]
    assert batch.page_T.tolist() == pages
    assert batch.offset_T.tolist() == [position % PAGE_SIZE for position in positions]
    # As wide as the longest needs; the last one has a page that it does not need yet.
    width = 6
    rows = [[*span.pages, *[0] * width][:width] for span in spans]
    assert batch.page_table_SN.tolist() == rows
    assert batch.cu_seqlens_S1.tolist() == [0, 5, 8, 9]
    assert batch.first_position_S.tolist() == [0, 6, 20]
    assert batch.table_id_S.tolist() == [2, 0, 1]
    assert batch.logit_rows_R.tolist() == [4, 8]
    assert batch.single_B.tolist() == [2]
    assert batch.places_S == ((0, 5, 0, 2), (5, 3, 6, 0), (8, 1, 20, 1))
    of_int64 = (batch.token_ids_1T, batch.position_ids_1T, batch.page_T, batch.logit_rows_R)
    assert {each.dtype for each in of_int64} == {torch.int64}
    assert batch.page_table_SN.dtype == torch.int32


def test_a_page_row_is_always_the_page_table() -> None:
    """The row follows a list that grows, is replaced by one of its length, or shrinks."""
    row, pages = PageRow(), [5]
    for page in range(40):
        pages.append(page)
        assert row.follow(pages).tolist() == pages
    other = list(reversed(pages))
    assert row.follow(other).tolist() == other
    del other[3:]
    other.append(77)
    assert row.follow(other).tolist() == other
    assert row.follow([]).tolist() == []


def test_a_page_row_is_the_same_object_while_its_pages_are() -> None:
    """A page table that is kept compares objects, so another object must mean other pages."""
    row, pages = PageRow(), [5, 6]
    first = row.follow(pages)
    assert row.follow(pages) is first
    pages.append(7)
    second = row.follow(pages)
    assert second is not first
    assert row.follow([5, 6, 7]) is not second


def span(pages: Any) -> Span:
    """A decode on these pages."""
    return Span([1], 0, pages, 0, range(1))


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4), max_size=12))
def test_a_kept_page_table_is_what_a_new_one_would_be(
    steps: list[list[tuple[int, bool]]],
) -> None:
    """Sequences come, go, change places and get pages; only the rows that changed are named."""
    lists, rows = [[10 * number] for number in range(4)], [PageRow() for _ in range(4)]
    kept, device_SN = PageTable(5, 3, padding=77), np.full((5, 3), 77, dtype=np.int32)
    for step in steps:
        for number, gets_page in step:
            if gets_page and len(lists[number]) < 3:
                lists[number].append(10 * number + len(lists[number]))
        numbers = list(dict.fromkeys(number for number, _ in step))
        spans = [span(rows[number].follow(lists[number])) for number in numbers]
        changed = kept.follow(spans)
        if changed is not None:
            device_SN[changed] = kept.pages_SN[changed]
        assert kept.follow(spans) is None, "nothing has changed since"
        for row, number in enumerate(numbers):
            pages = lists[number]
            assert device_SN[row, : len(pages)].tolist() == pages
        assert (device_SN[len(numbers) :, 0] == 77).all(), "padding is on a sequence's page"


def test_a_list_of_pages_is_copied_each_time() -> None:
    """A list may have changed in place."""
    kept, pages = PageTable(1, 2, padding=9), [1]
    assert kept.follow([span(pages)]) == (slice(0, 1), slice(0, 1))
    pages[0] = 2
    assert kept.follow([span(pages)]) is not None
    assert kept.pages_SN.tolist() == [[2, 9]]
