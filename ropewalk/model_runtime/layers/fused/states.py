"""Layers with states within a program.

Shapes: T = flat tokens, C = columns of an input.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import PagedContext
from ropewalk.model_runtime.attention.state_store import StateStore
from ropewalk.model_runtime.cpu_kernels import fused_decode as kernel
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Ints, Numbers, StateArrays
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.layers.fused.program import Instruction
from ropewalk.model_runtime.tracing.operations import Advance

_NO_ADDRESSES: Ints = np.empty((0, 2), np.int64)
_OPERANDS = (
    (kernel.FIRST, kernel.FIRST_AT),
    (kernel.SECOND, kernel.SECOND_AT),
    (kernel.THIRD, kernel.THIRD_AT),
    (kernel.FOURTH, kernel.FOURTH_AT),
)


def advance_function(instructions: Sequence[Instruction]) -> Any:
    """Return the compiled function that advances a program's states; None if it has none."""
    sources = (each.source for each in instructions)
    calls = (each.call for each in sources if isinstance(each, Advance))
    return next((call.operation().advance for call in calls), None)


def state_arrays(step: PagedContext) -> StateArrays:
    """Return the slots and parts of a step."""
    if step.states is None:
        return StateArrays(_NO_ADDRESSES, 0, step.parts_X4)
    assert isinstance(step.states, StateStore), "programs run on a CPU"
    return StateArrays(step.states.addresses_LX, step.states.num_slots, step.parts_X4)


def advanced(each: Instruction, source: Advance, step: PagedContext, arrays: list[Any]) -> Numbers:
    """Advance a layer's states by many rows; return what its output's product reads."""
    inputs: list[Tensor] = []
    for (slot, at), width, like in zip(
        _OPERANDS, _widths(source), source.call.inputs, strict=False
    ):
        begin = each.fields[at]
        part_TC = arrays[each.fields[slot]][:, begin : begin + width]
        # Kept inputs outlive the step's arrays.
        is_kept = step.state_calls is not None
        part_TC = part_TC.copy() if is_kept else np.ascontiguousarray(part_TC)
        inputs.append(as_tensor(part_TC, like.dtype))
    result: Numbers = as_numpy(step.advance(source.layer, source.call.of(inputs))[0])
    return result


def _widths(source: Advance) -> list[int]:
    return [len(each.columns_C) for each in source.inputs]
