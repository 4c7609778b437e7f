"""The prompts that a position method reads, cut into parts: the host's lists for the GPU's prefill.

A range of keys differs from row to row. The rows are cut where the bounds of a range break off, as
at the chunks of dual chunk attention. A part then has one mask: causal, causal with a window, or
none. Every row of a part sees a key, so no row is empty. Parts are read like prompts, and the
results of a row's ranges are merged by their log-sum-exp (prefill.py).

Shapes: T = query tokens, G = parts of a group.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place
from ropewalk.model_runtime.attention.prompt_groups import (
    Ints,
    Mask,
    Part,
    PromptGroup,
    QueryRows,
    divided,
    group_of,
    positions_of,
    rows_of,
    together_on_device,
)
from ropewalk.model_runtime.attention.work_list import BEYOND
from ropewalk.rope import PositionMethod


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """Parts that are read together. No row is in it twice."""

    parts: PromptGroup
    queries: QueryRows
    modulus_G: Tensor  # int32; key n stands at (n % modulus) // divisor
    divisor_G: Tensor  # int32


class PlacedPrompts:
    """The prompts of one step whose table has a position method."""

    def __init__(self, batch: Batch, methods: Mapping[int, PositionMethod]) -> None:
        self._device = batch.page_T.device
        self._table_width = batch.page_table_SN.shape[1]
        self._methods = methods
        self._places = [
            (index, place)
            for index, place in enumerate(batch.places_S)
            if place.num_tokens > 1 and place.table_id in methods
        ]
        self._groups: dict[tuple[int, int], list[PlacedGroup]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def row_T(self) -> Tensor:
        """Return the flat rows of all query tokens, int32."""
        parts = [Part.whole(index, place, None) for index, place in self._places]
        return together_on_device((rows_of(parts),), self._device)[0]

    def groups(self, window: int | None, tile: int) -> list[PlacedGroup]:
        """Return the groups of a layer with this window; `tile`: rows that a program takes.

        Parts of one range with the same mask are together, up to the keys of a group of prompts.
        """
        chosen = (window or 0, tile)
        if chosen not in self._groups:
            alike: dict[tuple[int, Mask], list[Part]] = {}
            for index, place in self._places:
                for range_index, mask, part in self._parts(index, place, window):
                    alike.setdefault((range_index, mask), []).append(part)
            self._groups[chosen] = [
                placed_group(parts, mask, tile, self._table_width, self._device)
                for (_, mask), every in alike.items()
                for parts in divided(every)
            ]
        return self._groups[chosen]

    def _parts(
        self, index: int, place: Place, window: int | None
    ) -> Iterator[tuple[int, Mask, Part]]:
        """Yield the parts of a prompt, with the number of their range and their mask."""
        method = self._methods[place.table_id]
        positions_T = torch.arange(place.num_tokens) + place.first_position
        for range_index, found in enumerate(method.ranges(positions_T)):
            begin_T, end_T, query_T = (each.numpy() for each in found)
            if window:
                begin_T = np.maximum(begin_T, positions_T.numpy() + 1 - window)
            for first, last in runs(begin_T, end_T):
                part = Part(
                    index,
                    place.begin + first,
                    last + 1 - first,
                    place.first_position + first,
                    int(begin_T[first]),
                    int(end_T[last] - begin_T[first]),
                    place.table_id,
                    query_T[first : last + 1],
                    method.key_maps[range_index],
                )
                yield range_index, mask_of(part, begin_T[first:], end_T[first:]), part


def placed_group(
    parts: list[Part], mask: Mask, tile: int, table_width: int, device: torch.device
) -> PlacedGroup:
    """Return the group of these parts; each has the positions of its tokens and its key map."""
    maps_2G = np.array([part.key_map for part in parts]).T
    maps_2G[maps_2G == 0] = BEYOND  # no modulus; or a divisor by which all keys are at 0
    placed = [part.placed_T for part in parts if part.placed_T is not None]
    num_tokens_G = [part.num_tokens for part in parts]
    row_T, position_T, table_id_T, placed_T, modulus_G, divisor_G = together_on_device(
        (
            rows_of(parts),
            positions_of(parts),
            np.repeat([part.table_id for part in parts], num_tokens_G),
            np.concatenate(placed),
            *maps_2G,
        ),
        device,
    )
    return PlacedGroup(
        group_of(parts, mask, tile, table_width, device),
        QueryRows(row_T, position_T, table_id_T, placed_T),
        modulus_G,
        divisor_G,
    )


def runs(begin_T: Ints, end_T: Ints) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of each run of rows whose bounds move alike.

    From row to row, each bound moves by 0 or by 1 throughout a run. Rows without keys are left out.
    """
    is_seen_T = begin_T < end_T
    moves_T2 = np.stack((np.diff(begin_T), np.diff(end_T)), axis=1)
    breaks_T = (moves_T2 >> 1).any(1) | (is_seen_T[1:] != is_seen_T[:-1])
    turns_T = np.zeros_like(breaks_T)
    turns_T[1:] = (moves_T2[1:] != moves_T2[:-1]).any(1) & ~breaks_T[:-1]
    first_T = np.flatnonzero(np.concatenate(([True], breaks_T | turns_T)))
    last_T = np.append(first_T[1:], len(begin_T)) - 1
    for first, last in zip(first_T.tolist(), last_T.tolist(), strict=True):
        if is_seen_T[first]:
            yield first, last


def mask_of(part: Part, begin_T: Ints, end_T: Ints) -> Mask:
    """Return the mask of a run, whose bounds begin the arrays.

    A row alone is causal, because torch's flash attention takes another way for rows without masks.
    """
    if part.num_tokens == 1:
        return Mask(-1, 0)
    begin_moves, end_moves = begin_T[1] > begin_T[0], end_T[1] > end_T[0]
    return Mask(part.num_keys - part.num_tokens if begin_moves else -1, 0 if end_moves else -1)
