"""Weights of few bits widened to float32, compiled: a chunk of a panel's inputs at a time.

The chunk is written to memory that stays in the level-1 cache, and products read it as they read
panels of float32. So a product has the order of sums of a float32 weight with the same values, and
its bits. A store and a load more for each register cost less than waiting for memory does.

Each format has its own function, and a model's kernel holds only those of its formats.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.choose import chooser
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FORMATS, PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.groups import group_beginner
from ropewalk.model_runtime.cpu_kernels.low_bits.unpack import unpacking
from ropewalk.model_runtime.cpu_kernels.register_sums import load_sums, no_sums, store_sums
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH

# How far ahead memory is prefetched: more than a latency of 100 ns at 30 GB/s, and not much more.
# Further ahead, whole bytes are read at two thirds of the rate on an AMD EPYC of the fifth
# generation (benchmarks/results/epyc-4.md).
_AHEAD_OF_BYTES, _AHEAD_OF_WORDS = 4 << 10, 8 << 10


# Numbers of rows whose sums stay in registers beside the weights of two registers of outputs. Their
# weights go from registers to products, which saves a store and the loads of a chunk. Three, five
# and eight rows took up to 1.2 times as long so on an AMD EPYC of the fourth generation.
FEW_ROWS = (1, 2, 4) if WIDTH == 16 else (1,)
_FEW_COLUMNS = 2


def _begin(kind: Format) -> Any:
    return group_beginner(kind, _AHEAD_OF_BYTES if kind.bits >= 8 else _AHEAD_OF_WORDS)


@cache
def _widener_of(kind: Format) -> Any:
    """Compiled: widen(panel, first, end, out), for one format."""
    width, step, scales_of, offsets_of, write, _ = unpacking(kind)
    begin_group, group = _begin(kind), kind.group
    scale_bytes, upper_bytes = kind.scale_bytes, kind.upper_bytes
    step_bytes = step * PANEL * kind.lower_bits // 8
    column_bytes, above_bytes = kind.unit_bytes, kind.upper_word_bytes

    @jit(borrows=True, apart=True)
    def widen(panel: int, first: int, end: int, out: Floats) -> None:
        for start in range(first, end, group):
            head, scales_at = begin_group(panel, start)
            for column in range(0, PANEL, width):
                scales = scales_of(head, scales_at, column)
                offsets = offsets_of(head, scales_at, column, scales)
                above = scales_at + scale_bytes + above_bytes * column
                at = scales_at + scale_bytes + upper_bytes + column * column_bytes
                place = (start - first) * PANEL + column
                for _ in range(0, group, step):
                    write(out, place, at, above, scales, offsets)
                    place += step * PANEL
                    at += step_bytes

    return widen


@cache
def _adder_of(kind: Format, num_rows: int) -> Any:
    """Compiled: add(panel, first, end, x, top, sums), for one format."""
    unpacked = unpacking(kind, 0 if num_rows == 1 else _FEW_COLUMNS)
    width, step, scales_of, offsets_of, _, add = unpacked
    begin_group, group = _begin(kind), kind.group
    scale_bytes, upper_bytes = kind.scale_bytes, kind.upper_bytes
    step_bytes = step * PANEL * kind.lower_bits // 8
    column_bytes, above_bytes = kind.unit_bytes, kind.upper_word_bytes
    columns = width // WIDTH

    @jit(borrows=True, apart=True)
    def add_rows(panel: int, first: int, end: int, x_RK: Floats, top: int, sums: Floats) -> None:
        stride = x_RK.shape[1]
        for start in range(first, end, group):
            head, scales_at = begin_group(panel, start)
            for column in range(0, PANEL, width):
                scales = scales_of(head, scales_at, column)
                offsets = offsets_of(head, scales_at, column, scales)
                above = scales_at + scale_bytes + above_bytes * column
                at = scales_at + scale_bytes + upper_bytes + column * column_bytes
                tile = load_sums(sums, column, PANEL, num_rows, columns)
                if start == first:
                    tile = no_sums(num_rows, columns)
                place = top * stride + start
                for _ in range(0, group, step):
                    tile = add(tile, x_RK, place, stride, at, above, scales, offsets)
                    place += step
                    at += step_bytes
                store_sums(sums, column, PANEL, tile, columns)

    return add_rows


@cache
def widener(numbers: tuple[int, ...]) -> Any:
    """Compiled: widen(number, panel, first, end, out), for the formats of these numbers.

    It writes inputs `first` to `end` - 1 of the panel at an address to `out`, [end - first, 64].
    Both are multiples of 32.
    """
    run = chooser((each, _widener_of(FORMATS[each])) for each in numbers)

    @jit()
    def widen(number: int, panel: int, first: int, end: int, out: Floats) -> None:
        run(number, (panel, first, end, out))

    return widen


@cache
def few_rows_adder(numbers: tuple[int, ...]) -> Any:
    """Compiled: add(number, panel, first, end, x_RK, top, num_rows, sums), for these formats.

    It writes the products of `num_rows` rows, one of FEW_ROWS, from `top` on with inputs `first` to
    `end` - 1 of a panel to `sums`, [R, 64].
    """
    add_1, add_2, add_4 = (
        chooser((each, _adder_of(FORMATS[each], rows)) for each in numbers)
        for rows in (FEW_ROWS if len(FEW_ROWS) > 1 else (1, 1, 1))
    )
    has_few = len(FEW_ROWS) > 1

    @jit()
    def add(
        number: int, panel: int, first: int, end: int, x_RK: Floats, top: int, num_rows: int,
        sums: Floats,
    ) -> None:  # fmt: skip
        arguments = (panel, first, end, x_RK, top, sums)
        if has_few and num_rows == 4:
            add_4(number, arguments)
        elif has_few and num_rows == 2:
            add_2(number, arguments)
        else:
            add_1(number, arguments)

    return add


def numbers_of(formats: Iterable[Format]) -> tuple[int, ...]:
    """Return the numbers of formats as `widener` takes them."""
    return tuple(sorted({kind.number for kind in formats}))
