"""Which cached keys a read sees, and where it places them: what a step reads is a list of these.

Shapes: S = sequences, N = pages, O = offsets in a page.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.batch import Batch


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Which cached keys of each sequence a read sees, and where it places them and the query.

    Index = place in the sequence's pages: `page_table[index // O]`, offset `index % O`.
    """

    begin_S: Tensor  # int64, first index that is seen
    end_S: Tensor  # int64, the index behind the last one
    position_S: Tensor  # int64, absolute position of the query
    most: int  # no range is longer
    page_position_SN: Tensor | None = None  # int64, where each page starts; None: page x O


def whole_range(batch: Batch, window: int | None) -> KeyRange:
    """All keys up to each sequence's own token; with a window, the last of them.

    At least one of the batch's sequences has a single token: left to the caller.
    """
    position_S = batch.first_position_S
    singles = (place for place in batch.places_S if place.num_tokens == 1)
    most = 1 + max(place.first_position for place in singles)
    if not window:
        return KeyRange(torch.zeros_like(position_S), position_S + 1, position_S, most)
    begin_S = (position_S + 1 - window).clamp(min=0)
    return KeyRange(begin_S, position_S + 1, position_S, min(most, window))
