"""The exact pages that a step writes: where the keys and values of its tokens go.

A sequence has one tail page, which the step continues. If its tokens fill more pages than one, then
all but the last are staged: they are exact for this step only, in memory that all layers use in
turn. The tail page then holds the last one.

Shapes: T = flat tokens, C = copies, N = quantised pages, X = tail pages, G = staged pages, K = key
heads, R = bytes of a record, E = numbers of a page of one head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span

if TYPE_CHECKING:
    from ropewalk.model_runtime.attention.quantised.cache import QuantisedCache


class LayerPages(NamedTuple):
    """The cache of one layer as numpy arrays."""

    records_NKR: NDArray[np.uint8]
    tail_XKE: Any  # float32, or bfloat16 as its bits
    sides: tuple[int, ...]  # the fields of `Sides` of cpu_kernels/quantised


@dataclass(frozen=True, slots=True)
class OwnPages:
    """The own page of each token of a step."""

    own_T: NDArray[np.int64]  # -1 - 2 * x: tail page x; -2 - 2 * g: staged page g
    copies_C2: tuple[tuple[int, int], ...]  # tail pages that the step leaves, and their stages
    staged: Tensor  # numbers of all staged pages of the layer with the most, [G, K * E]
    store: "QuantisedCache"

    def places(self) -> tuple[Tensor, Tensor]:
        """Return whether each token's page is a tail page, [T], and its number, [T].

        The others are staged.
        """
        own_T = torch.from_numpy(self.own_T)
        return own_T % 2 == 1, (-1 - own_T) // 2

    def layer(self, num_heads: int, num_numbers: int) -> Tensor:
        """Return the staged pages of a layer, [G, K, E]."""
        num_staged = len(self.staged)
        used = self.staged.view(-1)[: num_staged * num_heads * num_numbers]
        return used.view(num_staged, num_heads, num_numbers)

    def at_rows(self, rows_R: Sequence[int]) -> "OwnPages":
        """Return those of some tokens, after the step has written all."""
        return OwnPages(self.own_T[rows_R], (), self.staged, self.store)


def own_pages(spans: Sequence[Span], store: "QuantisedCache") -> OwnPages:
    """Return the own pages of a step's tokens."""
    own, copies, num_staged = [], [], 0
    for span in spans:
        first, page_size = span.first_position, store.page_size
        first_page = first // page_size
        pages_T = np.arange(first, first + len(span.token_ids)) // page_size
        last_page = int(pages_T[-1])
        staged_T = -2 - 2 * (num_staged + pages_T - first_page)
        own.append(np.where(pages_T == last_page, tail_codes(span.tail_page), staged_T))
        if first_page < last_page and first % page_size:
            copies.append((span.tail_page, num_staged))
        num_staged += last_page - first_page
    staged = torch.empty(num_staged, store.most_numbers, dtype=store.dtype)
    return OwnPages(np.concatenate(own), tuple(copies), staged, store)


def tail_codes(tail_pages_T: Any) -> Any:
    """Return the codes of tokens whose own pages are these tail pages."""
    return -1 - 2 * tail_pages_T
