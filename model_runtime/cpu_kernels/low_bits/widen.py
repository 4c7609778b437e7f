"""Weights of few bits widened to float32, compiled: a chunk of a panel's inputs at a time.

The chunk is written to memory that stays in the level-1 cache, and products read it as they read
panels of float32. So a product has the order of sums of a float32 weight with the same values, and
its bits. A store and a load more for each register cost less than waiting for memory does.

Each format has its own function, and a model's kernel holds only those of its formats.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from ropewalk.model_runtime.cpu_kernels.bf16_dot import load_sums, no_sums, store_sums
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.low_bits.choose import chooser
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FORMATS, PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import prefetch_at
from ropewalk.model_runtime.cpu_kernels.low_bits.unpack import PAIRS, unpacking
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH

_LINE_BYTES = 64
# How far ahead memory is prefetched: more than a latency of 100 ns at 30 GB/s, and not much more.
# Further ahead, whole bytes are read at two thirds of the rate on an AMD EPYC of the fifth
# generation (benchmarks/results.md).
_AHEAD_OF_BYTES, _AHEAD_OF_WORDS = 4 << 10, 8 << 10


class _Kernels(NamedTuple):
    """The compiled functions of one format."""

    widen: Any  # (panel, first, end, out)
    add: Any  # (panel, first, end, x, sums)


@cache
def _kernels_of(kind: Format, written: int) -> _Kernels:
    width, step, scales_of, offsets_of, write, add = unpacking(kind, written)
    block, block_bytes, head_bytes = kind.block, kind.block_bytes, kind.head_bytes
    group, group_bytes = kind.group, kind.group_bytes
    scale_bytes, upper_bytes = kind.scale_bytes, kind.upper_bytes
    step_bytes = step * PANEL * kind.lower_bits // 8
    ahead = _AHEAD_OF_BYTES if kind.bits >= 8 else _AHEAD_OF_WORDS
    column_bytes, columns = kind.unit_bytes, width // WIDTH
    column_step = 2 if written == PAIRS else 1
    above_bytes = kind.upper_word_bytes

    @jit(inline=True)
    def begin_group(panel: int, start: int) -> tuple[int, int]:
        """Return the addresses of a group's block and of the group, and prefetch later memory.

        All lines are prefetched, the factors of a block too. Without them products take up to twice
        as long.
        """
        head = panel + start // block * block_bytes
        scales_at = head + head_bytes + start % block // group * group_bytes
        begin = head if start % block == 0 else scales_at
        for at in range(begin, scales_at + group_bytes, _LINE_BYTES):
            prefetch_at(at + ahead)
        return head, scales_at

    @jit(borrows=True)
    def widen(panel: int, first: int, end: int, out: Numbers) -> None:
        for start in range(first, end, group):
            head, scales_at = begin_group(panel, start)
            for column in range(0, PANEL, width):
                scales = scales_of(head, scales_at, column)
                offsets = offsets_of(head, scales_at, column, scales)
                above = scales_at + scale_bytes + above_bytes * column
                at = scales_at + scale_bytes + upper_bytes + column * column_bytes
                place = (start - first) * PANEL + column * column_step
                for _ in range(0, group, step):
                    write(out, place, at, above, scales, offsets)
                    place += step * PANEL
                    at += step_bytes

    @jit(borrows=True)
    def add_row(panel: int, first: int, end: int, x_RK: Numbers, sums: Floats) -> None:
        for start in range(first, end, group):
            head, scales_at = begin_group(panel, start)
            for column in range(0, PANEL, width):
                scales = scales_of(head, scales_at, column)
                offsets = offsets_of(head, scales_at, column, scales)
                above = scales_at + scale_bytes + above_bytes * column
                at = scales_at + scale_bytes + upper_bytes + column * column_bytes
                tile = load_sums(sums, column, PANEL, 1, columns)
                if start == first:
                    tile = no_sums(1, columns)
                place = start
                for _ in range(0, group, step):
                    tile = add(tile, x_RK, place, at, above, scales, offsets)
                    place += step
                    at += step_bytes
                store_sums(sums, column, PANEL, tile, columns)

    return _Kernels(widen, add_row)


@cache
def widener(numbers: tuple[int, ...], written: int) -> Any:
    """Compiled: widen(number, panel, first, end, out), for the formats of these numbers.

    It writes inputs `first` to `end` - 1 of the panel at an address to `out`, [end - first, 64].
    Both are multiples of 32. `written`: FLOATS; ROUNDED for values that are rounded to bfloat16 and
    stored as float32; PAIRS for uint16 with the pairs of bf16_dot.py.
    """
    run = chooser((each, _kernels_of(FORMATS[each], written).widen) for each in numbers)

    @jit()
    def widen(number: int, panel: int, first: int, end: int, out: Numbers) -> None:
        run(number, (panel, first, end, out))

    return widen


@cache
def row_adder(numbers: tuple[int, ...], written: int) -> Any:
    """Compiled: add(number, panel, first, end, x_RK, sums), for the formats of these numbers.

    It writes the products of one row with inputs `first` to `end` - 1 of a panel to `sums`, [64].
    The weights go from registers to products: one row would not use a widened chunk again.
    """
    run = chooser((each, _kernels_of(FORMATS[each], written).add) for each in numbers)

    @jit()
    def add(number: int, panel: int, first: int, end: int, x_RK: Numbers, sums: Floats) -> None:
        run(number, (panel, first, end, x_RK, sums))

    return add


def numbers_of(formats: Iterable[Format]) -> tuple[int, ...]:
    """Return the numbers of formats as `widener` takes them."""
    return tuple(sorted({kind.number for kind in formats}))
