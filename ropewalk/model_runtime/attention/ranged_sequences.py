"""The sequences of a step that read ranges of keys, as the CPU's kernel takes them.

The kernel is imported, and compiled, when the first such sequence is read.

Shapes: S = sequences, W = work items, X = ranges of a query, N = pages, K = key heads, D = key
dimensions, O = offsets in a page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.attention.batch import Place
from ropewalk.model_runtime.attention.step_ranges import step_ranges
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import uses_pairs
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Ints, Numbers
from ropewalk.rope import MOST_RANGES, KeyMap, PositionMethod


@dataclass(frozen=True, slots=True)
class RangedSequences:
    """Which sequences of a step read ranges, and the ranges of their queries."""

    is_ranged_S: NDArray[np.bool_]
    plain: tuple[Any, ...]  # the fields of RangeArrays

    def items(self, items_W3: Ints) -> Ints:
        return items_W3[self.is_ranged_S[items_W3[:, 0]]]

    def others(self, items_W3: Ints) -> Ints:
        return items_W3[~self.is_ranged_S[items_W3[:, 0]]]

    def kernel(self, keys_NKDO: Numbers) -> Any:
        """Return the compiled kernel for a cache."""
        from ropewalk.model_runtime.cpu_kernels.attention import (  # noqa: PLC0415
            attention_ranges as attention,
        )

        in_pairs = uses_pairs(keys_NKDO)
        return attention.attend_ranges_in_pairs if in_pairs else attention.attend_ranges


def ranged_sequences(
    places_S: tuple[Place, ...], positions: Mapping[int, PositionMethod]
) -> RangedSequences | None:
    """Return the sequences whose table has a position method; None if there is none."""
    found = step_ranges(places_S, positions)
    if found is None:
        return None
    maps_SX = [
        (*key_maps, *[KeyMap()] * (MOST_RANGES - len(key_maps))) for key_maps in found.key_maps_SX
    ]
    maps_SX2 = np.array(maps_SX, dtype=np.int64).reshape(-1, MOST_RANGES, 2)
    plain = (
        found.begin_XT.numpy(),
        found.end_XT.numpy(),
        found.query_XT.numpy(),
        np.ascontiguousarray(maps_SX2[..., 0]),
        np.ascontiguousarray(maps_SX2[..., 1]),
    )
    is_ranged_S = np.array([bool(key_maps) for key_maps in found.key_maps_SX])
    return RangedSequences(is_ranged_S, plain)
