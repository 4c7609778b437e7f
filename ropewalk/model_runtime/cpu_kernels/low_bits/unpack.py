"""Intrinsics for numba that unpack a format: the scales of a group, and the weights of inputs.

They emit straight code for a few registers, because loops over single registers take twice as long.
The registers of scales stay loaded for all inputs of a group. A pass covers adjacent outputs, as
many as there are registers for.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import (
    constant_ints,
    emit_floats,
    emit_halves,
    emit_joined,
    emit_numbers,
    emit_powers,
    emit_signed,
    emit_unsigned,
    emit_words,
    further,
)
from ropewalk.model_runtime.cpu_kernels.low_bits.lookups import HAS_FLOAT_TABLES, emit_looked_up
from ropewalk.model_runtime.cpu_kernels.simd import (
    LANES,
    WIDTH,
    address_of,
    emit_broadcast,
    emit_constant,
    emit_fma,
    emit_store,
)
from ropewalk.model_runtime.cpu_kernels.target import vectors

_FEWEST_INPUTS = 4  # that straight code unpacks


class Unpacking(NamedTuple):
    """The intrinsics of a format, and the steps of the loops around them."""

    width: int  # outputs of a pass
    step: int  # inputs that `write` takes
    scales: Any  # (block, group, column) -> registers of scales
    offsets: Any  # (block, group, column, scales) -> registers that are added to scaled q
    write: Any  # (out, place, q, upper, scales, offsets): writes `step` inputs
    # (sums, x, place, stride, q, upper, scales, offsets) -> sums with their products. The tile of
    # sums has a row for each row of x; these are `stride` elements apart.
    add: Any


def _num_columns(kind: Format) -> int:
    """Return the registers of a pass. Scales, offsets and words must fit beside each other."""
    most = 8 if kind.bits >= 8 or vectors().num_registers >= 32 else 4
    return min(PANEL // WIDTH, most)


def _step(kind: Format) -> int:
    """Return the inputs that straight code unpacks: a group if its upper bits share a word."""
    return kind.group if kind.upper_bits else max(kind.unit_inputs, _FEWEST_INPUTS)


def _columns(builder: Any, column: Any, count: int) -> list[Any]:
    """Emit the first output of each register of a pass."""
    return [further(builder, column, WIDTH * index) for index in range(count)]


def _factors(kind: Format, builder: Any, block: Any, at: Any, index: int) -> Any:
    """Emit a register of a block's factors; `index` 0 is that of scales, 1 that of minima."""
    place = builder.add(block, builder.mul(at, at.type(kind.factor_bytes)))
    place = further(builder, place, index * PANEL * kind.factor_bytes)
    return (emit_powers if kind.has_powers else emit_halves)(builder, place)


def _of_group(kind: Format, builder: Any, group: Any, at: Any, index: int) -> Any:
    """Emit a register of a group's scales (`index` 0) or minima (1), as floats."""
    place = builder.add(group, at)
    if kind.scale_bits == 8:
        place = further(builder, place, index * PANEL)
        load = emit_unsigned if kind.has_minimum else emit_signed
        return emit_floats(builder, load(builder, place))
    both = emit_unsigned(builder, place)
    parts = [(both, index * kind.scale_bits, kind.scale_bits)]
    return emit_floats(builder, emit_joined(builder, parts, 0))


def _scales(
    kind: Format, builder: Any, block: Any, group: Any, column: Any, *, count: int
) -> Iterator[Any]:
    """Yield the scale of each register."""
    for at in _columns(builder, column, count):
        if not kind.num_factors:
            yield emit_constant(1.0)
            continue
        factor = _factors(kind, builder, block, at, 0)
        if kind.scale_bits:
            factor = builder.fmul(factor, _of_group(kind, builder, group, at, 0))
        yield factor


def _offsets(
    kind: Format, builder: Any, block: Any, group: Any, column: Any, scales: list[Any]
) -> Iterator[Any]:
    """Yield the number that is added to each register of scaled q."""
    for at, scale in zip(_columns(builder, column, len(scales)), scales, strict=True):
        if not kind.has_minimum:
            yield builder.fmul(scale, emit_constant(-float(kind.zero)))  # exact
            continue
        least = _factors(kind, builder, block, at, 1)
        if kind.scale_bits:
            least = builder.fmul(least, _of_group(kind, builder, group, at, 1))
        yield builder.fmul(least, emit_constant(-1.0))


def _zero(kind: Format) -> int:
    """Return the number that is subtracted from q itself.

    Otherwise it is subtracted with the scale. The sum is then exact, because the difference is. A
    processor that rounds twice needs an exact product, too, and so few bits of q.
    """
    is_exact = vectors().has_fma or (kind.bits == 4 and not kind.table)
    return 0 if is_exact and not (kind.table and HAS_FLOAT_TABLES) else kind.zero


def _weight(kind: Format, builder: Any, numbers: Any, scale: Any, offset: Any) -> Any:
    """Emit a register of weights from its q, rounded once."""
    if not kind.num_factors:
        return numbers
    if kind.has_minimum or _zero(kind) != kind.zero:
        return emit_fma(builder, numbers, scale, offset)
    return builder.fmul(numbers, scale)


def _place(kind: Format, k: int) -> int:
    """Return the bit at which the lowest bit of input k's q is left in its register.

    Every second q of a word stays 16 (or 4) times too large, and such a part of the scale makes up
    for it, to the bit. This saves half of the shifts, where there are registers for these scales.
    """
    if kind.lower_bits >= 8 or kind.table or vectors().num_registers < 32:
        return 0
    return kind.lower_bits if k % 2 else 0


def _numbers(kind: Format, builder: Any, q: Any, upper: Any, column: int) -> Iterator[Any]:
    """Yield q of each input of a step, times 2^_place, as floats of one register of outputs."""
    at, lower = WIDTH * column, kind.lower_bits
    above, zero = None, _zero(kind)
    if kind.upper_bits:
        size = kind.upper_word_bytes
        above = emit_words(builder, further(builder, upper, size * at), size)
    for k in range(_step(kind)):
        unit, index = divmod(k, kind.unit_inputs)
        address = further(builder, q, kind.unit_bytes * (unit * PANEL + at))
        if lower >= 8:
            yield (
                emit_numbers(builder, address)
                if not kind.num_factors
                else emit_floats(builder, emit_signed(builder, address))
            )
            continue
        if index == 0:
            words = emit_words(builder, address)
        if kind.table:
            yield emit_looked_up(builder, kind.table, zero, words, index * lower)
            continue
        parts = [(words, index * lower, lower)]
        if above is not None:
            parts.append((above, kind.upper_place(k), kind.upper_bits))
        numbers = emit_joined(builder, parts, _place(kind, k))
        if zero:
            numbers = builder.sub(numbers, constant_ints(zero << _place(kind, k)))
        yield emit_floats(builder, numbers)


def _emit_weights(
    kind: Format, use: Callable[[int, int, Any], None], builder: Any, q: Any, upper: Any,
    scales: list[Any], offsets: list[Any],
) -> None:  # fmt: skip
    """Emit the weights of a step, and `use` them by input and register."""
    places = {_place(kind, k) for k in range(_step(kind))}
    scales_at = {
        place: [builder.fmul(each, emit_constant(2.0**-place)) for each in scales]
        if place
        else scales
        for place in places
    }
    columns = [_numbers(kind, builder, q, upper, column) for column in range(len(scales))]
    for k, row in enumerate(zip(*columns, strict=True)):
        for column, numbers in enumerate(row):
            scale = scales_at[_place(kind, k)][column]
            use(k, column, _weight(kind, builder, numbers, scale, offsets[column]))


@cache
def unpacking(kind: Format, columns: int = 0) -> Unpacking:
    """Return the intrinsics of a format.

    `columns`: registers of a pass; 0: as many as there are for one row.
    """
    columns = columns or _num_columns(kind)
    registers = types.UniTuple(LANES, columns)

    def scales(typingctx: Any, block: Any, group: Any, column: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            found = list(_scales(kind, builder, *values[:3], count=columns))
            return context.make_tuple(builder, registers, found)

        return registers(block, group, column), code

    def offsets(typingctx: Any, block: Any, group: Any, column: Any, scales: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            loaded = cgutils.unpack_tuple(builder, values[3])
            block, group, column = values[:3]
            found = list(_offsets(kind, builder, block, group, column, loaded))
            return context.make_tuple(builder, registers, found)

        return registers(block, group, column, scales), code

    def write(
        typingctx: Any, out: Any, place: Any, q: Any, upper: Any, scales: Any, offsets: Any  # noqa: ARG001
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            memory, first, at, above, *tuples = values

            def store(k: int, column: int, lanes: Any) -> None:
                place = further(builder, first, k * PANEL + column * WIDTH)
                emit_store(builder, out, address_of(context, builder, out, memory, place), lanes)

            loaded = (cgutils.unpack_tuple(builder, each) for each in tuples)
            _emit_weights(kind, store, builder, at, above, *loaded)
            return context.get_dummy_value()

        return types.none(out, place, q, upper, scales, offsets), code

    def add(
        typingctx: Any,  # noqa: ARG001
        sums: Any, x: Any, place: Any, stride: Any, q: Any, upper: Any, scales: Any, offsets: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            before, memory, first, step, at, above, *tuples = values
            tile = cgutils.unpack_tuple(builder, before)

            def multiply(further_on: int, column: int, weights: Any) -> None:
                place = further(builder, first, further_on)
                for row in range(0, len(tile), columns):
                    address = address_of(context, builder, x, memory, place)
                    number = emit_broadcast(builder, builder.load(address))
                    before = tile[row + column]
                    tile[row + column] = emit_fma(builder, number, weights, before)
                    place = builder.add(place, step)

            loaded = (cgutils.unpack_tuple(builder, each) for each in tuples)
            _emit_weights(kind, multiply, builder, at, above, *loaded)
            return context.make_tuple(builder, sums, tile)

        return sums(sums, x, place, stride, q, upper, scales, offsets), code

    for each in (
        scales,
        offsets,
        write,
        add,
    ):  # the cache of compiled code tells them apart by name
        each.__name__ = f"{each.__name__}_{kind.name}_{columns}"
    intrinsics = (intrinsic(each) for each in (scales, offsets, write, add))
    return Unpacking(columns * WIDTH, _step(kind), *intrinsics)
