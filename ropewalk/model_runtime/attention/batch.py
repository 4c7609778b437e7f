"""The flat tensors of one step, built from the spans of its sequences.

The tokens of all sequences are in one row. A page table maps each sequence's positions to pages.
Position p of a sequence is at offset p % page_size of its page p // page_size.

If the layers are in several groups (page_groups.py), then a page of positions is a page of each
group. The pages of a sequence then stand group beside group.

Shapes: S = sequences in the step, B = sequences with one token, T = flat tokens, N = pages of
the longest sequence, R = rows of logits, G = groups of layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.model_runtime.transfer import on_device

if TYPE_CHECKING:
    from ropewalk.model_runtime.attention.prompt_groups import PaddedPrompts
    from ropewalk.model_runtime.attention.quantised.own_pages import OwnPages
    from ropewalk.model_runtime.attention.state_store import DeviceParts

NO_SLOT = -1  # of a part whose states begin with zeros
_NO_PARTS = np.empty((0, 4), dtype=np.int64)


class Span(NamedTuple):
    """Consecutive tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    first_position: int
    # Page table, long enough for the last position. An array must keep its numbers (`PageTable`).
    pages: Sequence[int] | NDArray[np.int32]
    table_id: int  # index of its rotation table
    logit_rows: Sequence[int]  # tokens that need logits, counted from the span's start
    states: Sequence[StatePart] = ()  # all of its tokens, in order; none if a model has no states
    tail_page: int = 0  # of its sequence, in a cache that quantises pages


class Place(NamedTuple):
    """The location of one sequence's tokens in a step."""

    begin: int  # in the flat row
    num_tokens: int
    first_position: int  # absolute
    table_id: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors, on the model's device."""

    token_ids_1T: Tensor  # int64
    position_ids_1T: Tensor  # int64, absolute
    page_T: Tensor  # int64, page of each token's key; of several groups, in the first
    offset_T: Tensor  # int64
    page_table_SN: Tensor  # int32, padded with 0; of several groups, that of the first
    cu_seqlens_S1: Tensor  # int64 [S + 1], start of each sequence's tokens in the row
    first_position_S: Tensor  # int64, absolute position of each sequence's first token here
    table_id_S: Tensor  # int64
    logit_rows_R: Tensor  # int64, flat tokens that need logits
    single_B: Tensor  # int64, sequences with one token here
    places_S: tuple[Place, ...]  # the host's copy, which avoids a wait for the device
    same_pages_S: tuple[bool, ...]  # the host's, of `same_pages`
    # Those of the GPU's kernels (WorkList by Cut, ExactWork by ExactCut), made for a first layer.
    work_lists: dict[Any, Any] = field(default_factory=dict)
    # Begin, end, slot to read (-1: zeros) and slot to write of each part, int64 [X, 4]; the host's.
    parts_X4: NDArray[np.int64] = field(default_factory=lambda: _NO_PARTS)
    device_parts: "DeviceParts | None" = None  # of a captured step, whose places are fixed
    has_draft_parts: bool = False  # some of them are drafts, whose inputs are needed again
    own_pages: "OwnPages | None" = None  # None: the cache holds every page as it was written
    # Of all groups of layers; the fields of these names are of the first. None: there is one group.
    page_table_GSN: Tensor | None = None
    page_GT: Tensor | None = None
    prompts: "PaddedPrompts | None" = None  # of a captured step; None: those in the places

    def of_group(self, group: int) -> "Batch":
        """Return the batch with the pages of another group of layers than the first."""
        assert self.page_table_GSN is not None, "a batch of one group"
        assert self.page_GT is not None, "a batch of one group"
        return replace(self, page_T=self.page_GT[group], page_table_SN=self.page_table_GSN[group])


class PageRow:
    """A sequence's page table as an array, kept between steps.

    A long context has a thousand pages, and a decode step adds at most one.
    """

    def __init__(self) -> None:
        self._pages: Sequence[int] = ()
        self._num_copied = 0
        self._row_N = np.empty(0, dtype=np.int32)
        self._used_N = self._row_N

    def follow(self, pages: Sequence[int]) -> NDArray[np.int32]:
        """Return the pages as int32 [N]. A different or shorter list is copied from its start.

        The array is the same object as before if and only if the pages are.
        """
        if pages is self._pages and len(pages) == self._num_copied:
            return self._used_N
        if pages is not self._pages or len(pages) < self._num_copied:
            self._pages, self._num_copied = pages, 0
        if len(pages) > len(self._row_N):
            grown_N = np.empty(2 * len(pages), dtype=np.int32)
            grown_N[: self._num_copied] = self._row_N[: self._num_copied]
            self._row_N = grown_N
        self._row_N[self._num_copied : len(pages)] = pages[self._num_copied :]
        self._num_copied = len(pages)
        self._used_N = self._row_N[: len(pages)]
        return self._used_N


class PageTable:
    """The page tables of the rows of a step as one array, kept between steps.

    Most steps give no sequence another page, so most rows stay as they are.
    """

    def __init__(self, num_rows: int, num_pages: int, padding: int) -> None:
        """Build a table whose rows are padding: their sequences hold the page `padding` only."""
        self.pages_SN = np.full((num_rows, num_pages), padding, dtype=np.int32)
        self._padding = padding
        self._rows: list[object] = [None] * num_rows  # the array that a row was copied from
        self._num_used = 0

    def follow(self, spans: Sequence[Span]) -> tuple[slice, slice] | None:
        """Copy the pages of the spans to the first rows, and return the part that changed.

        The part is rows and columns; None: no row changed. Rows after the spans become padding.
        An array that a row already has is not compared, so its numbers must be the same.
        """
        changed, width = [], 1
        for row, span in enumerate(spans):
            pages = span.pages
            if pages is self._rows[row]:
                continue
            self._rows[row] = pages if isinstance(pages, np.ndarray) else None
            used = pages[: self.pages_SN.shape[1]]
            self.pages_SN[row, : len(used)] = used
            changed.append(row)
            width = max(width, len(used))
        for row in range(len(spans), self._num_used):
            self._rows[row] = None
            self.pages_SN[row] = self._padding
            changed.append(row)
        self._num_used = len(spans)
        return (slice(changed[0], changed[-1] + 1), slice(0, width)) if changed else None

    def forget(self) -> None:
        """Let the next `follow` return every row, after its last answer was not used."""
        self._rows = [None] * len(self._rows)
        self._num_used = len(self._rows)


def same_pages(spans: Sequence[Span]) -> tuple[bool, ...]:
    """Return whether each span has the pages of the span before it, as those of `single_rows`."""
    pages = [span.pages for span in spans]
    return False, *map(is_, pages[1:], pages)


def places_of(spans: Sequence[Span]) -> tuple[Place, ...]:
    """Return the places of sequences one after the other."""
    num_tokens_S = [len(span.token_ids) for span in spans]
    begins = [0, *accumulate(num_tokens_S)]
    return tuple(
        Place(begin, num_tokens, span.first_position, span.table_id)
        for begin, num_tokens, span in zip(begins, num_tokens_S, spans, strict=False)
    )


def build_batch(
    spans: Sequence[Span], page_size: int, device: torch.device, num_groups: int = 1
) -> Batch:
    """Build the batch of the spans, with two transfers to a device.

    It makes few numpy calls. After a forward, their code is not in the processor's cache, and
    fetching it takes longer than the work of a decode step.
    """
    places = places_of(spans)
    num_tokens_S = [place.num_tokens for place in places]
    begin_S1 = [0, *accumulate(num_tokens_S)]
    positions = [
        range(each.first_position, each.first_position + each.num_tokens) for each in places
    ]
    host = (
        [*chain.from_iterable(span.token_ids for span in spans)],
        [*chain.from_iterable(positions)],
        begin_S1,
        [place.first_position for place in places],
        [place.table_id for place in places],
        [
            place.begin + row
            for place, span in zip(places, spans, strict=True)
            for row in span.logit_rows
        ],
        [index for index, num_tokens in enumerate(num_tokens_S) if num_tokens == 1],
    )
    sizes = [len(each) for each in host]
    numbers = np.fromiter(chain.from_iterable(host), np.int64, sum(sizes))
    parts = [span.states for span in spans]
    num_tokens = begin_S1[-1]
    columns, offsets = np.divmod(numbers[num_tokens : 2 * num_tokens], page_size)
    width = max(each.stop - 1 for each in positions) // page_size + 1
    is_split = num_groups > 1
    table = _page_tables(spans, width, num_groups) if is_split else _page_table(spans, width)
    pages = table[..., np.repeat(np.arange(len(spans)), num_tokens_S), columns].ravel()
    joined = on_device(np.concatenate((numbers, offsets, pages), dtype=np.int64), device)
    split = joined.split_with_sizes([*sizes, num_tokens, len(pages)])
    token_ids_T, position_ids_T, cu_seqlens_S1, first_position_S, table_id_S, *rest = split
    logit_rows_R, single_B, offset_T, page_T = rest
    batch = Batch(
        token_ids_1T=token_ids_T[None],
        position_ids_1T=position_ids_T[None],
        page_T=page_T,
        offset_T=offset_T,
        page_table_SN=on_device(table, device),
        cu_seqlens_S1=cu_seqlens_S1,
        first_position_S=first_position_S,
        table_id_S=table_id_S,
        logit_rows_R=logit_rows_R,
        single_B=single_B,
        places_S=places,
        same_pages_S=same_pages(spans),
        parts_X4=state_parts(zip(begin_S1, parts, strict=False)) if parts[0] else _NO_PARTS,
        has_draft_parts=bool(parts[0]) and any(each[-1].is_draft for each in parts),
    )
    return batch if num_groups == 1 else _in_groups(batch, num_groups)


def _in_groups(batch: Batch, num_groups: int) -> Batch:
    """Return a batch whose pages are those of all groups as one of the first group."""
    tables, page_GT = batch.page_table_SN, batch.page_T.view(num_groups, -1)
    return replace(
        batch, page_T=page_GT[0], page_table_SN=tables[0], page_table_GSN=tables, page_GT=page_GT
    )


def by_group(pages_SX: NDArray[np.int32], num_groups: int) -> NDArray[np.int32]:
    """Return page tables whose pages stand group beside group as one for each group, [G, S, N].

    It is contiguous, as the kernels take it. Holes become page 0, as in every batch of several
    groups: no query reads them, and no address may lie outside the cache.
    """
    table_GSN = np.empty((num_groups, len(pages_SX), pages_SX.shape[1] // num_groups), np.int32)
    for group, table_SN in enumerate(table_GSN):
        np.maximum(pages_SX[:, group::num_groups], 0, out=table_SN)
    return table_GSN


def single_rows(spans: Sequence[Span]) -> list[Span]:
    """Return each token of drafts or short prompts as a span of its own, with logits.

    It shares its sequence's pages, so a GPU reads them once for several rows (work_list.py). All
    keys of a step are written before any are read, so a row sees those of the rows before it.
    """
    return [
        Span(
            (token_id,),
            span.first_position + row,
            span.pages,
            span.table_id,
            range(1),
            tail_page=span.tail_page,
        )
        for span in spans
        for row, token_id in enumerate(span.token_ids)
    ]


def state_parts(parts: Iterable[tuple[int, Sequence[StatePart]]]) -> NDArray[np.int64]:
    """Return the parts of all sequences as rows, int64 [X, 4].

    `parts`: for each sequence, its first token in the flat row, and its parts.
    """
    rows = []
    for first, of_sequence in parts:
        begin = first
        for part in of_sequence:
            end = begin + part.num_tokens
            rows.append((begin, end, NO_SLOT if part.read is None else part.read, part.write))
            begin = end
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _page_table(spans: Sequence[Span], width: int) -> NDArray[np.int32]:
    """Return the page table, int32 [S, N]; entries without a page are 0, and holes stay.

    Kernels address only pages of the ranges that their queries read, so they meet no hole. Torch
    takes a hole for the last page, and gives its keys no weight.
    """
    table_SN = np.zeros((len(spans), width), dtype=np.int32)
    for row_N, span in zip(table_SN, spans, strict=False):
        used = span.pages[: len(row_N)]
        row_N[: len(used)] = used
    return table_SN


def _page_tables(spans: Sequence[Span], width: int, num_groups: int) -> NDArray[np.int32]:
    """Return the page table of each group, int32 [G, S, N]; entries without a page are 0.

    Each row goes to its places at once: a table of long contexts is larger than the L2 cache.
    """
    table_GSN = np.zeros((num_groups, len(spans), width), dtype=np.int32)
    for table_GN, span in zip(table_GSN.swapaxes(0, 1), spans, strict=True):
        used_NG = np.asarray(span.pages[: width * num_groups], np.int32).reshape(-1, num_groups)
        table_GN[:, : len(used_NG)] = used_NG.T
    return np.maximum(table_GSN, 0, out=table_GSN)
