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

from model_runtime.cpu_kernels.low_bits.formats import PANEL, WORD, Format, upper_place
from model_runtime.cpu_kernels.low_bits.loads import (
    constant_ints,
    emit_bfloat16,
    emit_floats,
    emit_halves,
    emit_joined,
    emit_signed,
    emit_unsigned,
    emit_words,
    further,
)
from model_runtime.cpu_kernels.processor import vectors
from model_runtime.cpu_kernels.simd import (
    LANES,
    WIDTH,
    address_of,
    emit_broadcast,
    emit_constant,
    emit_fma,
    emit_store,
)

_WORD_BYTES = 4


class Unpacking(NamedTuple):
    """The intrinsics of a format, and the steps of the loops around them."""

    width: int  # outputs of a pass
    step: int  # inputs that `write` takes
    scales: Any  # (block, group, column) -> registers of scales
    offsets: Any  # (block, group, column, scales) -> registers that are added to scaled q
    write: Any  # (out, place, q, upper, scales, offsets): writes `step` inputs
    add: Any  # (sums, x, place, q, upper, scales, offsets) -> sums with their products


def _num_columns(kind: Format) -> int:
    """Return the registers of a pass. Scales, offsets and words must fit beside each other."""
    most = 8 if kind.bits == 8 or vectors().num_registers >= 32 else 4
    return min(PANEL // WIDTH, most)


def _step(kind: Format) -> int:
    """Return the inputs that straight code unpacks: a group if its upper bits share a word."""
    return kind.group if kind.upper_bits else 4 if kind.bits == 8 else WORD


def _at(builder: Any, base: Any, column: Any, size: int) -> Any:
    """Emit the address of a column's number of `size` bytes."""
    return builder.add(base, builder.mul(column, column.type(size)))


def _columns(kind: Format, builder: Any, column: Any) -> list[Any]:
    """Emit the first output of each register of a pass."""
    return [further(builder, column, WIDTH * index) for index in range(_num_columns(kind))]


def _scales(kind: Format, builder: Any, block: Any, group: Any, column: Any) -> Iterator[Any]:
    """Yield the scale of each register."""
    for at in _columns(kind, builder, column):
        factor = emit_halves(builder, _at(builder, block, at, 2))
        if kind.has_byte_scales:
            load = emit_unsigned if kind.has_minimum else emit_signed
            factor = builder.fmul(
                factor, emit_floats(builder, load(builder, builder.add(group, at)))
            )
        yield factor


def _offsets(
    kind: Format, builder: Any, block: Any, group: Any, column: Any, scales: list[Any]
) -> Iterator[Any]:
    """Yield the number that is added to each register of scaled q."""
    for at, scale in zip(_columns(kind, builder, column), scales, strict=True):
        if not kind.has_minimum:
            yield builder.fmul(scale, emit_constant(-float(kind.zero)))  # exact
            continue
        least = emit_halves(builder, _at(builder, further(builder, block, 2 * PANEL), at, 2))
        if kind.has_byte_scales:
            numbers = emit_unsigned(builder, further(builder, builder.add(group, at), PANEL))
            least = builder.fmul(least, emit_floats(builder, numbers))
        yield builder.fmul(least, emit_constant(-1.0))


def _weight(kind: Format, builder: Any, numbers: Any, scale: Any, offset: Any) -> Any:
    """Emit a register of weights from its q, rounded once."""
    if kind.has_minimum or kind.bits == 4:  # q times scale is exact
        return emit_fma(builder, emit_floats(builder, numbers), scale, offset)
    return builder.fmul(emit_floats(builder, numbers), scale)


def _place(kind: Format, k: int) -> int:
    """Return the bit at which the lowest bit of input k's q is left in its register.

    Every second q of a word stays 16 times too large, and a sixteenth of the scale makes up for it,
    to the bit. This saves half of the shifts, where there are registers for these scales.
    """
    return 4 if kind.bits < 8 and k % 2 and vectors().num_registers >= 32 else 0


def _numbers(kind: Format, builder: Any, q: Any, upper: Any, column: int) -> Iterator[Any]:
    """Yield q of each input of a step, times 2^_place, for one register of outputs."""
    at = WIDTH * column
    if kind.bits == 8:
        for k in range(_step(kind)):
            yield emit_signed(builder, further(builder, q, k * PANEL + at))
        return
    above = None
    if kind.upper_bits:
        above = emit_words(builder, further(builder, upper, _WORD_BYTES * at))
    for k in range(_step(kind)):
        if k % WORD == 0:
            place = _WORD_BYTES * (k // WORD * PANEL + at)
            words = emit_words(builder, further(builder, q, place))
        parts = [(words, k % WORD * 4, 4)]
        if above is not None:
            parts.append((above, upper_place(k, kind.upper_bits), kind.upper_bits))
        numbers = emit_joined(builder, parts, _place(kind, k))
        if kind.zero and kind.bits > 4:
            numbers = builder.sub(numbers, constant_ints(kind.zero << _place(kind, k)))
        yield numbers


def _emit_weights(
    kind: Format, use: Callable[[int, int, Any], None], builder: Any, q: Any, upper: Any,
    scales: list[Any], offsets: list[Any],
) -> None:  # fmt: skip
    """Emit the weights of a step, and `use` them by input and register."""
    scales_at = {0: scales, 4: [builder.fmul(each, emit_constant(1 / 16)) for each in scales]}
    columns = [_numbers(kind, builder, q, upper, column) for column in range(_num_columns(kind))]
    for k, row in enumerate(zip(*columns, strict=True)):
        for column, numbers in enumerate(row):
            scale = scales_at[_place(kind, k)][column]
            use(k, column, _weight(kind, builder, numbers, scale, offsets[column]))


@cache
def unpacking(kind: Format, *, is_rounded: bool) -> Unpacking:
    """Return the intrinsics of a format. `is_rounded`: weights are rounded to bfloat16."""
    registers = types.UniTuple(LANES, _num_columns(kind))

    def scales(typingctx: Any, block: Any, group: Any, column: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return context.make_tuple(builder, registers, list(_scales(kind, builder, *values)))

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
                stored = emit_bfloat16(builder, lanes) if is_rounded else lanes
                emit_store(builder, out, address_of(context, builder, out, memory, place), stored)

            loaded = (cgutils.unpack_tuple(builder, each) for each in tuples)
            _emit_weights(kind, store, builder, at, above, *loaded)
            return context.get_dummy_value()

        return types.none(out, place, q, upper, scales, offsets), code

    def add(
        typingctx: Any, sums: Any, x: Any, place: Any, q: Any, upper: Any, scales: Any, offsets: Any  # noqa: ARG001
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            before, memory, first, at, above, *tuples = values
            tile = cgutils.unpack_tuple(builder, before)

            def multiply(further_on: int, column: int, lanes: Any) -> None:
                place = further(builder, first, further_on)
                number = builder.load(address_of(context, builder, x, memory, place))
                weights = emit_bfloat16(builder, lanes) if is_rounded else lanes
                tile[column] = emit_fma(
                    builder, emit_broadcast(builder, number), weights, tile[column]
                )

            loaded = (cgutils.unpack_tuple(builder, each) for each in tuples)
            _emit_weights(kind, multiply, builder, at, above, *loaded)
            return context.make_tuple(builder, registers, tile)

        return registers(sums, x, place, q, upper, scales, offsets), code

    for each in (
        scales,
        offsets,
        write,
        add,
    ):  # the cache of compiled code tells them apart by name
        each.__name__ = f"{each.__name__}_{kind.name}_{int(is_rounded)}"
    intrinsics = (intrinsic(each) for each in (scales, offsets, write, add))
    return Unpacking(_num_columns(kind) * WIDTH, _step(kind), *intrinsics)
