"""Key ranges: the cached keys that a read sees, and their positions. A step reads a list of them.

Shapes: S = sequences, N = pages, O = offsets in a page.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.batch import Batch


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The cached keys of each sequence that a read sees, and the positions of keys and query.

    An index is a place in the sequence's pages: `page_table[index // O]`, offset `index % O`.
    """

    begin_S: Tensor  # int64, first index that is seen
    end_S: Tensor  # int64, the index after the last one
    position_S: Tensor  # int64, absolute position of the query
    most: int  # max length of a range
    page_position_SN: Tensor | None = None  # int64, start of each page; None: page x O


def whole_range(batch: Batch, window: int | None) -> KeyRange:
    """Return the range of all keys up to each sequence's own token; with a window, the last ones.

    The caller must ensure that at least one of the batch's sequences has a single token.
    """
    position_S = batch.first_position_S
    singles = (place for place in batch.places_S if place.num_tokens == 1)
    most = 1 + max(place.first_position for place in singles)
    if not window:
        return KeyRange(torch.zeros_like(position_S), position_S + 1, position_S, most)
    begin_S = (position_S + 1 - window).clamp(min=0)
    return KeyRange(begin_S, position_S + 1, position_S, min(most, window))
