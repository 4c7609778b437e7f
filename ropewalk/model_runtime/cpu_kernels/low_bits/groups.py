"""The place of a group of inputs in a panel, and the prefetch of later groups."""

from functools import cache
from typing import Any

from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import Format
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import prefetch_at

_LINE_BYTES = 64


@cache
def group_beginner(kind: Format, ahead_bytes: int) -> Any:
    """Compiled: begin_group(panel, start) -> the addresses of a group's block and of the group.

    `start` is the group's first input. `ahead_bytes`: the distance to the memory that is
    prefetched.
    """
    block, block_bytes, head_bytes = kind.block, kind.block_bytes, kind.head_bytes
    group, group_bytes = kind.group, kind.group_bytes

    @jit(inline=True)
    def begin_group(panel: int, start: int) -> tuple[int, int]:
        """Return the addresses, and prefetch as many lines as the group has.

        The factors of a block are prefetched, too. Without them products take up to twice as long.
        """
        head = panel + start // block * block_bytes
        scales_at = head + head_bytes + start % block // group * group_bytes
        begin = head if start % block == 0 else scales_at
        for at in range(begin, scales_at + group_bytes, _LINE_BYTES):
            prefetch_at(at + ahead_bytes)
        return head, scales_at

    return begin_group
