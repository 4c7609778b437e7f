"""The memory of a program's slots, for a step of a few rows."""

import numpy as np

from ropewalk.model_runtime.cpu_kernels import fused_decode as kernel
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Numbers
from ropewalk.model_runtime.layers.fused.program import Program

_LINE = 64  # bytes of a cache line, at which a slot begins


def offsets_of(program: Program, *, is_shared: bool) -> list[int | None]:
    """Return where each slot begins, in columns of all of them; None for the other kind."""
    found: list[int | None] = []
    end = 0
    head = program.instructions[-1].fields[kernel.OUT]
    for place, slot in enumerate(program.slots):
        is_outside = place in (program.embedding, head) and slot.is_shared
        if slot.is_shared is not is_shared or is_outside:
            found.append(None)
            continue
        found.append(end)
        end += -(-slot.width // _LINE) * _LINE
    return [*found, end]


class Memory:
    """The memory of slots of one kind, for a count of rows."""

    def __init__(self, offsets: list[int | None], num_rows: int, like: Numbers) -> None:
        *begins, end = offsets
        assert end is not None
        self._memory = np.empty(num_rows * end + _LINE, like.dtype)
        skipped = -self._memory.ctypes.data % _LINE // like.itemsize
        self._memory = self._memory[skipped:]
        base, row = self._memory.ctypes.data, num_rows * like.itemsize
        self.addresses_B = np.array(
            [0 if begin is None else base + begin * row for begin in begins], np.int64
        )

    def rows(self, slot: int, num_rows: int, width: int) -> Numbers:
        """Return the rows of a slot, [R, C]."""
        begin = (int(self.addresses_B[slot]) - self._memory.ctypes.data) // self._memory.itemsize
        return self._memory[begin : begin + num_rows * width].reshape(num_rows, width)
