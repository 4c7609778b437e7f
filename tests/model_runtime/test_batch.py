"""The flat tensors of a step agree with its sequences, token by token."""

import torch

from model_runtime.batch import PageRow, Span, build_batch

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
