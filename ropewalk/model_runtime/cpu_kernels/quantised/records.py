"""Quantised pages: their bytes, and the registers of float32 that a kernel makes of them.

A record holds one page of one key head. It has the codes of the keys channel by channel, those of
the values token by token, then the parameters as float16: the lowest number of each channel, its
step, and both of each row of values. A row is a token, or one of its groups of dimensions. A number
is code * step + lowest, rounded once to float32. In four bits a byte holds two codes: of offsets o
and o + O/2 of a channel, or of the first and the second half of a row of values. So a load of
neighbouring bytes makes two registers. Both halves of a channel have parameters then: those of all
first halves, and behind them those of all second ones.

A tail page holds the numbers as they were written: keys [D, O], then values [O, V], for each key
head. `docs/design/kv-cache.md` has the rule that says which page is read in which form.

Shapes: N = quantised pages, X = tail pages, G = staged pages, K = key heads, R = bytes of a record,
E = numbers of a tail page and head, D = key dimensions, V = value dimensions, O = offsets in a
page, S = rotation tables, T = flat tokens. P is any count of parameters.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AngleArrays,
    Floats,
    Ints,
    Numbers,
)
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import (
    constant_ints,
    emit_floats,
    emit_halves,
    emit_unsigned,
    prefetch_at,
)
from ropewalk.model_runtime.cpu_kernels.simd import (
    LANES,
    WIDTH,
    broadcast,
    fma,
    load,
    multiply,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.target import target_features

Bytes = NDArray[np.uint8]
LINE = 64  # bytes in a cache line; a record is a whole number of them
_FOUR_BITS = 4
_HALF_BYTES = 2
_TOO_LARGE = 65536.0  # the float16 that has no number, without an instruction that knows it


class Sides(NamedTuple):
    """The sizes of a layer's records."""

    num_heads: int
    dim: int
    value_dim: int
    page_size: int
    key_bits: int  # 8 or 4
    value_bits: int
    value_groups: int  # rows of a token's values; each has a lowest number and a step


class QuantisedPages(NamedTuple):
    """The cache of one layer, and where this step's tokens were written."""

    records_NKR: Bytes
    tail_XKE: Numbers
    staged_GKE: Numbers
    # A token's own page: -1 - 2 * x for tail page x, -2 - 2 * g for staged page g.
    own_T: Ints
    sides: Sides


@jit(inline=True)
def key_rows(sides: Sides) -> int:
    """Return how many rows of keys have parameters: channels, or their halves in four bits."""
    return 2 * sides.dim if sides.key_bits == _FOUR_BITS else sides.dim


@jit(inline=True)
def _value_codes(sides: Sides) -> int:
    """Return where the codes of values begin in a record."""
    return sides.dim * sides.page_size * sides.key_bits // 8


@jit(inline=True)
def _parameters(sides: Sides) -> int:
    """Return where the parameters begin in a record."""
    return _value_codes(sides) + sides.value_dim * sides.page_size * sides.value_bits // 8


@jit()
def record_bytes(sides: Sides) -> int:
    """Return R, as `attention/quantised/page_format.py` does."""
    parameters = 2 * _HALF_BYTES * (key_rows(sides) + sides.page_size * sides.value_groups)
    return -(-(_parameters(sides) + parameters) // LINE) * LINE


def _intrinsic(emit: Any) -> Any:
    """Build an intrinsic that makes Lanes from the bytes at an address."""

    @intrinsic  # type: ignore[untyped-decorator]
    def loaded(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
        def code(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return emit(builder, values[0])

        return LANES(address), code

    return loaded


def _emit_lower(builder: Any, address: Any) -> Any:
    return emit_floats(builder, builder.and_(emit_unsigned(builder, address), constant_ints(15)))


def _emit_upper(builder: Any, address: Any) -> Any:
    return emit_floats(builder, builder.lshr(emit_unsigned(builder, address), constant_ints(4)))


def _emit_parameters(builder: Any, address: Any) -> Any:
    numbers = emit_halves(builder, address)
    if "f16c" in target_features():
        return numbers

    def every(number: float) -> Any:
        return ir.Constant(numbers.type, [number] * WIDTH)

    is_number = builder.fcmp_ordered("<", numbers, every(_TOO_LARGE))
    return builder.select(is_number, numbers, every(float("nan")))


_byte_codes = _intrinsic(lambda builder, at: emit_floats(builder, emit_unsigned(builder, at)))
_lower_codes = _intrinsic(_emit_lower)
_upper_codes = _intrinsic(_emit_upper)
_parameters_at = _intrinsic(_emit_parameters)


@jit(borrows=True)
def _load_parameters(address: int, count: int, row_P: Floats) -> int:
    """Widen the lowest numbers and the steps of `count` rows; return where the steps begin."""
    width = -(-count // WIDTH) * WIDTH
    for at in range(0, count, WIDTH):
        store(row_P, at, _parameters_at(address + _HALF_BYTES * at))
        store(row_P, width + at, _parameters_at(address + _HALF_BYTES * (count + at)))
    return width


@jit(inline=True, borrows=True)
def _put_turned(
    keys_DO: Numbers, at: int, half: int, angles: AngleArrays, table: int, first: Any, second: Any
) -> None:
    """Rotate the two halves of a pair, and store them."""
    cos, sin = load(angles.cos, table), load(angles.sin, table)
    store(keys_DO, at, subtract(multiply(first, cos), multiply(second, sin)))
    store(keys_DO, half + at, fma(second, cos, multiply(first, sin)))


# A loop over a known number of registers has no branches: a step over `int4` takes 0.9 of the time.
_COMMON = 64  # positions of a page, and numbers of a row of values


def _turner(size: int) -> Any:
    """Compiled: `turn_quantised` for pages of `size` positions, or of any number if it is 0."""

    @jit(borrows=True)
    def turn(
        address: int, next_address: int, sides: Sides, offsets: AngleArrays, table_id: int,
        row_P: Floats, keys_DO: Numbers,
    ) -> None:  # fmt: skip
        dim, bits = sides.dim, sides.key_bits
        page_size = size or sides.page_size
        steps = _load_parameters(address + _parameters(sides), key_rows(sides), row_P)
        upper = key_rows(sides) - dim  # from the parameters of a first half to those of a second
        pairs = offsets.cos.shape[1]
        row_bytes, half = page_size * bits // 8, pairs * page_size
        num_lines = record_bytes(sides) // LINE
        lines_each = -(-num_lines // dim)
        for d in range(dim):
            if next_address != 0:
                for line in range(d * lines_each, min(num_lines, (d + 1) * lines_each)):
                    prefetch_at(next_address + line * LINE)
            if pairs <= d < 2 * pairs:
                continue
            low, step = broadcast(row_P[d]), broadcast(row_P[steps + d])
            codes, at = address + d * row_bytes, d * page_size
            low_2, step_2 = broadcast(row_P[upper + d]), broadcast(row_P[steps + upper + d])
            if d >= 2 * pairs:
                if bits == _FOUR_BITS:
                    for o in range(0, row_bytes, WIDTH):
                        store(keys_DO, at + o, fma(_lower_codes(codes + o), step, low))
                        store(
                            keys_DO, at + row_bytes + o, fma(_upper_codes(codes + o), step_2, low_2)
                        )
                else:
                    for o in range(0, page_size, WIDTH):
                        store(keys_DO, at + o, fma(_byte_codes(codes + o), step, low))
                continue
            other_low, other_step = broadcast(row_P[d + pairs]), broadcast(row_P[steps + d + pairs])
            others, table = codes + pairs * row_bytes, (table_id * pairs + d) * page_size
            if bits == _FOUR_BITS:
                other = upper + d + pairs
                other_low_2, other_step_2 = broadcast(row_P[other]), broadcast(row_P[steps + other])
                for o in range(0, row_bytes, WIDTH):
                    first, second = (
                        fma(_lower_codes(codes + o), step, low),
                        fma(_lower_codes(others + o), other_step, other_low),
                    )
                    third, fourth = (
                        fma(_upper_codes(codes + o), step_2, low_2),
                        fma(_upper_codes(others + o), other_step_2, other_low_2),
                    )
                    _put_turned(keys_DO, at + o, half, offsets, table + o, first, second)
                    beyond = row_bytes + o
                    _put_turned(keys_DO, at + beyond, half, offsets, table + beyond, third, fourth)
            else:
                for o in range(0, page_size, WIDTH):
                    first, second = (
                        fma(_byte_codes(codes + o), step, low),
                        fma(_byte_codes(others + o), other_step, other_low),
                    )
                    _put_turned(keys_DO, at + o, half, offsets, table + o, first, second)

    return turn


def _widener(length: int) -> Any:
    """Compiled: `widen_values` for rows of `length` numbers, or of any number if it is 0."""

    @jit(borrows=True)
    def widen(address: int, sides: Sides, row_P: Floats, scratch_OV: Floats) -> None:
        groups, bits = sides.value_groups, sides.value_bits
        dim, num_rows = length or sides.value_dim // groups, sides.page_size * groups
        parameters = address + _parameters(sides) + 2 * _HALF_BYTES * key_rows(sides)
        steps = _load_parameters(parameters, num_rows, row_P)
        width, row_bytes = scratch_OV.shape[1], dim * bits // 8
        first = address + _value_codes(sides)
        for row in range(num_rows):
            low, step = broadcast(row_P[row]), broadcast(row_P[steps + row])
            codes, at = first + row * row_bytes, row // groups * width + row % groups * dim
            if bits == _FOUR_BITS:
                for v in range(0, row_bytes, WIDTH):
                    store(scratch_OV, at + v, fma(_lower_codes(codes + v), step, low))
                for v in range(0, row_bytes, WIDTH):
                    store(scratch_OV, at + row_bytes + v, fma(_upper_codes(codes + v), step, low))
            else:
                for v in range(0, dim, WIDTH):
                    store(scratch_OV, at + v, fma(_byte_codes(codes + v), step, low))

    return widen


_turn_common, _turn_any = _turner(_COMMON), _turner(0)
_widen_common, _widen_any = _widener(_COMMON), _widener(0)


@jit(borrows=True)
def turn_quantised(
    address: int, next_address: int, sides: Sides, offsets: AngleArrays, table_id: int,
    row_P: Floats, keys_DO: Numbers,
) -> None:  # fmt: skip
    """Rotate a quantised page's keys by their offsets, and prefetch the record that is read next.

    `next_address` is 0 if no quantised page follows.
    """
    if sides.page_size == _COMMON:
        _turn_common(address, next_address, sides, offsets, table_id, row_P, keys_DO)
    else:
        _turn_any(address, next_address, sides, offsets, table_id, row_P, keys_DO)


@jit(borrows=True)
def widen_values(address: int, sides: Sides, row_P: Floats, scratch_OV: Floats) -> None:
    """Widen a quantised page's values to float32.

    A register may end behind its row, so the scratch has a row more than the page.
    """
    if sides.value_dim == _COMMON * sides.value_groups:
        _widen_common(address, sides, row_P, scratch_OV)
    else:
        _widen_any(address, sides, row_P, scratch_OV)


@jit(borrows=True)
def turn_tail(
    tail_XKE: Numbers, place: int, head: int, sides: Sides, offsets: AngleArrays, table_id: int,
    keys_DO: Numbers,
) -> None:  # fmt: skip
    """Rotate a tail page's keys by their offsets."""
    _, num_heads, size = tail_XKE.shape
    base = (place * num_heads + head) * size
    pairs = offsets.cos.shape[1]
    half = pairs * sides.page_size
    table = table_id * half
    for at in range(0, half, WIDTH):
        first, second = load(tail_XKE, base + at), load(tail_XKE, base + half + at)
        _put_turned(keys_DO, at, half, offsets, table + at, first, second)
    for at in range(2 * half, sides.dim * sides.page_size, WIDTH):
        store(keys_DO, at, load(tail_XKE, base + at))
