"""Layers with states within a program: their slots and parts, and inputs that drafts need again.

Shapes: T = flat tokens, C = columns of a slot, L = layers with states, R = rows that are kept, Y =
columns of all inputs of a layer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import PagedStep
from ropewalk.model_runtime.cpu_kernels import fused_decode as kernel
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.kernel_arguments import Ints, Numbers, StateArrays
from ropewalk.model_runtime.layers.fused.operations import Advance
from ropewalk.model_runtime.layers.fused.program import Instruction

_NO_ADDRESSES: Ints = np.empty((0, 2), np.int64)
_OPERANDS = (
    (kernel.FIRST, kernel.FIRST_AT),
    (kernel.SECOND, kernel.SECOND_AT),
    (kernel.THIRD, kernel.THIRD_AT),
    (kernel.FOURTH, kernel.FOURTH_AT),
)


class StateLayers:
    """The layers of a program that keep states."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._sources = [each.source for each in instructions if isinstance(each.source, Advance)]
        self._width = max((sum(_widths(each)) for each in self._sources), default=0)

    def advance_function(self) -> Any:
        """Return the compiled function that advances every layer; None without any."""
        return self._sources[0].call.operation().advance if self._sources else None

    def arrays(self, step: PagedStep, like: Numbers) -> StateArrays:
        """Return the slots and parts of a step; `like`: its rows."""
        num_kept = 0 if step.state_calls is None else len(like)
        kept_LRY = np.empty((len(self._sources), num_kept, self._width), like.dtype)
        if step.states is None:
            return StateArrays(_NO_ADDRESSES, 0, step.parts_X4, kept_LRY)
        states = step.states
        return StateArrays(states.addresses_LX, states.num_slots, step.parts_X4, kept_LRY)

    def keep(self, step: PagedStep, kept_LRY: NDArray[Any], dtype: Any) -> None:
        """Let a step advance states by drafts later, from the inputs that it kept."""
        if step.state_calls is None:
            return
        for source, kept_RY in zip(self._sources, kept_LRY, strict=True):
            edges = np.cumsum(_widths(source))[:-1]
            parts = np.split(kept_RY[:, : sum(_widths(source))], edges, axis=1)
            inputs = [as_tensor(np.ascontiguousarray(part), dtype) for part in parts]
            step.state_calls[source.layer] = source.call.of(inputs)


def advanced(each: Instruction, source: Advance, step: PagedStep, arrays: list[Any]) -> Numbers:
    """Advance a layer's states by many rows; return what its output's product reads."""
    inputs: list[Tensor] = []
    for (slot, at), width, like in zip(
        _OPERANDS, _widths(source), source.call.inputs, strict=False
    ):
        begin = each.fields[at]
        part_TC = arrays[each.fields[slot]][:, begin : begin + width]
        inputs.append(as_tensor(np.ascontiguousarray(part_TC), like.dtype))
    result: Numbers = as_numpy(step.advance(source.layer, source.call.of(inputs))[0])
    return result


def _widths(source: Advance) -> list[int]:
    return [len(each.columns_C) for each in source.inputs]
