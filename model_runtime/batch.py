"""The flat tensors of one step, built from what the scheduler chose.

Tokens of all sequences stand in one row. A page table says where each sequence's positions are:
position p of a sequence is at offset p % page_size of its page p // page_size.

Shapes: S = sequences in the step, T = flat tokens, N = pages of the longest of them, R = rows of
logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    first_position: int
    pages: Sequence[int]  # the sequence's page table, long enough for the last position
    table_slot: int  # which rotation table it is read under
    logit_rows: Sequence[int]  # which of the tokens need logits, counted from the span's start


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


def build_batch(spans: Sequence[Span], page_size: int, device: torch.device) -> Batch:
    """Lay the spans out in one row."""
    token_ids: list[int] = []
    positions: list[int] = []
    page_ids: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    for span in spans:
        logit_rows += [starts[-1] + row for row in span.logit_rows]
        span_positions = range(span.first_position, span.first_position + len(span.token_ids))
        token_ids += span.token_ids
        positions += span_positions
        page_ids += [span.pages[position // page_size] for position in span_positions]
        starts.append(len(token_ids))
    width = max(-(-(span.first_position + len(span.token_ids)) // page_size) for span in spans)
    table_SN = np.zeros((len(spans), width), dtype=np.int32)
    for row_N, span in zip(table_SN, spans, strict=True):
        used = span.pages[:width]
        row_N[: len(used)] = used

    def tensor(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    position_T = tensor(positions)
    return Batch(
        tensor([token_ids]),
        position_T[None],
        tensor(page_ids),
        position_T % page_size,
        torch.from_numpy(table_SN).to(device),
        tensor(starts),
        tensor([span.first_position for span in spans]),
        tensor([span.table_slot for span in spans]),
        tensor(logit_rows),
    )
