"""The flat tensors of one step, built from what the scheduler chose.

Tokens of all sequences stand in one row. A page table says where each sequence's positions are:
position p of a sequence is at offset p % page_size of its page p // page_size.

Shapes: S = sequences in the step, B = those of them with one token, T = flat tokens, N = pages of
the longest sequence, R = rows of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Span(NamedTuple):
    """Consecutive tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    first_position: int
    pages: Sequence[int]  # the sequence's page table, long enough for the last position
    table_slot: int  # which rotation table it is read under
    logit_rows: Sequence[int]  # which of the tokens need logits, counted from the span's start


class Place(NamedTuple):
    """Where one sequence's tokens of a step are."""

    begin: int  # in the flat row
    num_tokens: int
    first_position: int  # absolute
    table_slot: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors, on the model's device."""

    token_ids_1T: Tensor  # int64
    position_ids_1T: Tensor  # int64, absolute
    page_T: Tensor  # int64, where each token's key goes
    offset_T: Tensor  # int64
    page_table_SN: Tensor  # int32, padded with 0
    query_start_S1: Tensor  # int64 [S + 1], where each sequence's tokens begin in the row
    first_position_S: Tensor  # int64, absolute position of each sequence's first token here
    table_slot_S: Tensor  # int64
    logit_rows_R: Tensor  # int64, flat tokens whose logits are wanted
    single_B: Tensor  # int64, which sequences have one token here
    places_S: tuple[Place, ...]  # what the host knows of it, so that nobody waits to ask


class PageRow:
    """A sequence's page table as numbers of the batch, kept from step to step.

    A long context has a thousand pages, and a step adds one at most.
    """

    def __init__(self) -> None:
        self._pages: Sequence[int] = ()
        self._num_copied = 0
        self._row_N = np.empty(0, dtype=np.int32)

    def follow(self, pages: Sequence[int]) -> Any:
        """The same as int32 [N]. A list that is another one, or shorter, is copied anew."""
        if pages is not self._pages or len(pages) < self._num_copied:
            self._pages, self._num_copied = pages, 0
        if len(pages) > len(self._row_N):
            grown_N = np.empty(2 * len(pages), dtype=np.int32)
            grown_N[: self._num_copied] = self._row_N[: self._num_copied]
            self._row_N = grown_N
        self._row_N[self._num_copied : len(pages)] = pages[self._num_copied :]
        self._num_copied = len(pages)
        return self._row_N[: len(pages)]


def build_batch(spans: Sequence[Span], page_size: int, device: torch.device) -> Batch:
    """Lay the spans out in one row; two transfers to a device."""
    lengths = [len(span.token_ids) for span in spans]
    starts = [0, *accumulate(lengths)]
    num_tokens = starts[-1]
    first_S = np.array([span.first_position for span in spans], dtype=np.int64)
    position_T = np.arange(num_tokens) + np.repeat(first_S - starts[:-1], lengths)
    width = int((first_S + lengths - 1).max()) // page_size + 1
    table_SN = np.zeros((len(spans), width), dtype=np.int32)
    for row_N, span in zip(table_SN, spans, strict=True):
        used = span.pages[:width]
        row_N[: len(used)] = used
    rows = [
        start + row for start, span in zip(starts, spans, strict=False) for row in span.logit_rows
    ]
    places = tuple(
        Place(start, length, span.first_position, span.table_slot)
        for start, length, span in zip(starts, lengths, spans, strict=False)
    )
    parts = (
        np.fromiter(chain.from_iterable(span.token_ids for span in spans), np.int64, num_tokens),
        position_T,
        table_SN[np.repeat(np.arange(len(spans)), lengths), position_T // page_size],
        position_T % page_size,
        np.array(starts),
        first_S,
        np.array([span.table_slot for span in spans]),
        np.array(rows, dtype=np.int64),
        np.flatnonzero(np.array(lengths) == 1),
    )
    numbers = torch.from_numpy(np.concatenate(parts, dtype=np.int64)).to(device)
    split = torch.split_with_sizes(numbers, [len(part) for part in parts])
    token_ids_T, position_ids_T, page_T, offset_T, query_start_S1, *rest = split
    first_position_S, table_slot_S, logit_rows_R, single_B = rest
    return Batch(
        token_ids_T[None],
        position_ids_T[None],
        page_T,
        offset_T,
        torch.from_numpy(table_SN).to(device),
        query_start_S1,
        first_position_S,
        table_slot_S,
        logit_rows_R,
        single_B,
        places,
    )
