"""The key ranges of a step's queries, for sequences whose table has a position method.

The host makes them once a step for all layers with the same tables. A step without a method makes
none.

Shapes: S = sequences, T = flat query tokens, X = ranges of a query.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Place
from ropewalk.rope import MOST_RANGES, KeyMap, PositionMethod


@dataclass(frozen=True, slots=True)
class StepRanges:
    """The ranges of all queries; those of a sequence without a method are empty."""

    begin_XT: Tensor  # int64, index of the first key
    end_XT: Tensor  # int64, index after the last key
    query_XT: Tensor  # int64, position at which the query stands
    key_maps_SX: tuple[tuple[KeyMap, ...], ...]  # no entry: the sequence has no method


def step_ranges(
    places_S: tuple[Place, ...], positions: Mapping[int, PositionMethod]
) -> StepRanges | None:
    """Return the ranges under the methods of the tables; None if no sequence has one."""
    methods_S = [positions.get(place.table_id) for place in places_S]
    if not any(methods_S):
        return None
    num_tokens = places_S[-1].begin + places_S[-1].num_tokens
    begin_XT, end_XT, query_XT = torch.zeros(3, MOST_RANGES, num_tokens, dtype=torch.int64)
    for place, method in zip(places_S, methods_S, strict=True):
        if method is None:
            continue
        own = slice(place.begin, place.begin + place.num_tokens)
        first = place.first_position
        ranges = method.ranges(torch.arange(first, first + place.num_tokens))
        for x, (begin_T, end_T, query_T) in enumerate(ranges):
            begin_XT[x, own], end_XT[x, own], query_XT[x, own] = begin_T, end_T, query_T
    maps = tuple(() if method is None else method.key_maps for method in methods_S)
    return StepRanges(begin_XT, end_XT, query_XT, maps)
