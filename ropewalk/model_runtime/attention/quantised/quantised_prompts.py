"""The prompts over quantised pages, cut into parts: the host's lists for the GPU's prefill.

A query reads earlier pages quantised and its own page exact. So the keys of a row have these
sources:

- its own page, up to its own key;
- the pages before the chunk, quantised;
- the pages between both, quantised. Their number differs from page to page of the chunk. It is a
  sum of powers of two, and each is a block of pages that the rows of as many pages see alike.

A part is a run of rows with one mask over successive keys of one source. Keys of a source are
gathered once, those between as often as the number of pages has binary digits. Parts are read like
prompts, and a row's parts are merged by their log-sum-exp (`gpu/prefill_parts.py`). The ranges of a
position method are cut by source in the same way.

Shapes: T = query tokens of a prompt, G = parts of a group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place
from ropewalk.model_runtime.attention.placed_prompts import (
    CutPrompts,
    PlacedGroup,
    mask_of,
    placed_group,
    runs,
)
from ropewalk.model_runtime.attention.prompt_groups import (
    Ints,
    Mask,
    Part,
    divided,
    together_on_device,
)
from ropewalk.model_runtime.attention.quantised.own_pages import OwnPages
from ropewalk.rope import KeyMap, PositionMethod


class Source(Enum):
    """The memory that a part's keys are in."""

    QUANTISED = "quantised"
    TAIL = "tail"
    STAGED = "staged"


@dataclass(frozen=True, slots=True)
class QuantisedGroup:
    """Parts that are read together, from one source. No row is in it twice."""

    placed: PlacedGroup
    source: Source
    page_G: Tensor | None  # int32, the exact page of each part; None: those of the page table


class _Kind(NamedTuple):
    """Parts with one kind are together."""

    range_index: int
    level: int
    source: Source
    mask: Mask


class QuantisedPrompts(CutPrompts):
    """The prompts of one step over a cache that quantises pages."""

    def __init__(self, batch: Batch, own: OwnPages, methods: Mapping[int, PositionMethod]) -> None:
        super().__init__(batch, methods, is_every=True)
        self._own = own
        self._page_size = own.store.page_size
        self._groups: dict[tuple[int, int], list[QuantisedGroup]] = {}

    def groups(self, window: int | None, tile: int) -> list[QuantisedGroup]:
        """Return the groups of a layer with this window; `tile`: rows that a program takes."""
        chosen = (window or 0, tile)
        if chosen not in self._groups:
            alike: dict[_Kind, list[Part]] = {}
            for index, place in self._places:
                for kind, part in self._parts(index, place, window):
                    alike.setdefault(kind, []).append(part)
            self._groups[chosen] = [
                self._group(kind, parts, tile)
                for kind, every in alike.items()
                for parts in divided(every)
            ]
        return self._groups[chosen]

    def _parts(self, index: int, place: Place, window: int | None) -> Iterator[tuple[_Kind, Part]]:
        """Yield the parts of a prompt. A part's `sequence` is where its pages begin in a table."""
        method, first = self._methods.get(place.table_id), place.first_position
        position_T = np.arange(first, first + place.num_tokens)
        key_maps = (KeyMap(),) if method is None else method.key_maps
        for range_index, (bounds, key_map) in enumerate(
            zip(_ranges(method, position_T), key_maps, strict=True)
        ):
            begin_T, end_T, query_T = bounds
            if window:
                begin_T = np.maximum(begin_T, position_T + 1 - window)
            for cut in self._cuts(index, place, position_T):
                rows = cut.rows
                low_T = np.maximum(begin_T[rows], cut.low_T)
                high_T = np.minimum(end_T[rows], cut.high_T)
                for one, last in runs(low_T, high_T):
                    at = rows.start + one
                    part = Part(
                        cut.page_at,
                        place.begin + at,
                        last + 1 - one,
                        first + at,
                        int(low_T[one]),
                        int(high_T[last] - low_T[one]),
                        place.table_id,
                        query_T[at : rows.start + last + 1],
                        key_map,
                    )
                    mask = mask_of(part, low_T[one:], high_T[one:])
                    yield _Kind(range_index, cut.level, cut.source, mask), part

    def _cuts(self, index: int, place: Place, position_T: Ints) -> Iterator["_Cut"]:
        """Yield the keys of each source, for the rows that may see them."""
        page_size, own_T = self._page_size, self._own.own_T
        page_T = position_T // page_size
        first_page = int(page_T[0])
        quantised_at, every = index * self._table_width, slice(0, len(position_T))
        far_T = np.full_like(page_T, first_page * page_size)
        yield _Cut(Source.QUANTISED, -1, quantised_at, every, far_T * 0, far_T)
        between_T = page_T - first_page
        for level in range(int(between_T[-1]).bit_length()):
            begin_T = first_page + (between_T >> level + 1 << level + 1)
            is_seen_T = between_T >> level & 1
            low_T, high_T = begin_T * is_seen_T, (begin_T + (1 << level)) * is_seen_T
            bounds = low_T * page_size, high_T * page_size
            yield _Cut(Source.QUANTISED, level, quantised_at, every, *bounds)
        for page in range(first_page, int(page_T[-1]) + 1):
            inside = np.flatnonzero(page_T == page)
            rows = slice(int(inside[0]), int(inside[-1]) + 1)
            code = -1 - int(own_T[place.begin + rows.start])
            source = Source.STAGED if code % 2 else Source.TAIL
            low_T = page_T[rows] * page_size
            # The place is in the table `page_G`, in which a part has one page.
            yield _Cut(source, 0, code // 2, rows, low_T, low_T + page_size)

    def _group(self, kind: _Kind, parts: list[Part], tile: int) -> QuantisedGroup:
        page_G = None
        if kind.source is not Source.QUANTISED:
            pages = np.array([part.sequence for part in parts])
            (page_G,) = together_on_device((pages,), self._device)
            parts = [
                part._replace(sequence=at - part.first_key // self._page_size)
                for at, part in enumerate(parts)
            ]
        placed = placed_group(parts, kind.mask, tile, 1, self._device)
        return QuantisedGroup(placed, kind.source, page_G)


class _Cut(NamedTuple):
    """The keys of one source that some rows may see."""

    source: Source
    level: int  # of a block of quantised pages
    page_at: int  # of quantised pages in the flattened page table; or the number of an exact page
    rows: slice
    low_T: Ints
    high_T: Ints


def _ranges(method: PositionMethod | None, position_T: Ints) -> list[tuple[Ints, Ints, Ints]]:
    """Return begin, end and position of the query in each range; without a method all is one."""
    if method is None:
        return [(position_T * 0, position_T + 1, position_T)]
    ranges = method.ranges(torch.from_numpy(position_T))
    return [(begin.numpy(), end.numpy(), query.numpy()) for begin, end, query in ranges]
