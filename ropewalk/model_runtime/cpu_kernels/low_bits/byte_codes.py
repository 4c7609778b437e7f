"""Weights of few bits as unsigned bytes, four inputs beside each other, for integer products.

A weight is `scale * (byte - zero)`, plus an offset in formats with minima. A chunk of a panel is
unpacked to three arrays in the level-1 cache:

1. bytes: for each four inputs, 64 outputs with four bytes each;
2. scales: for each group, 64 outputs, in float32;
3. offsets, laid out as scales; only in formats with minima.

Words of few bits give every second input (of eight) or every fourth (of sixteen) with one shift and
one mask for 64 bits and more. `ORDERS` in `rounded_rows.py` are these orders of inputs.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.integer_dot import INTS
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.rounded_rows import Records, joined
from ropewalk.model_runtime.cpu_kernels.low_bits.groups import group_beginner
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import (
    constant_ints,
    emit_rotated,
    emit_shifted,
    emit_words,
    further,
)
from ropewalk.model_runtime.cpu_kernels.low_bits.pair_codes import emit_pair_codes
from ropewalk.model_runtime.cpu_kernels.low_bits.unpack import unpacking
from ropewalk.model_runtime.cpu_kernels.register_sums import store_sums
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, address_of
from ropewalk.model_runtime.cpu_kernels.target import target_features, vectors

QUAD = 4  # inputs in a lane
# How far ahead memory is prefetched. One row took up to 1.5 times as long with 4 KiB on an AMD EPYC
# of the fourth generation, and no longer without a prefetch.
AHEAD_BYTES = 8 << 10
_BIAS = 128  # of the bytes of signed ones
_BYTE = ir.IntType(8)


class Bytes(NamedTuple):
    """The bytes of a format, beside the format's own facts."""

    order: int  # of inputs, in ORDERS
    zero: int  # is subtracted from bytes
    most: int  # the largest byte


def bytes_of(kind: Format) -> Bytes:
    """Return the facts about a format's bytes."""
    if kind.bits == 8:
        return Bytes(0, _BIAS, 255)
    zero = 0 if kind.has_minimum else kind.zero
    most = kind.table[-1] if kind.table else 2**kind.bits - 1
    return Bytes(int(kind.lower_bits == 2), zero, most)  # bits


def _mask(builder: Any, words: Any, byte: int) -> Any:
    return builder.and_(words, constant_ints(byte * 0x0101_0101))


def _of_bytes(kind: Format, builder: Any, at: Any) -> Iterator[Any]:
    """Yield the quads of a group of whole bytes."""
    rows, half = ir.VectorType(_BYTE, WIDTH), ir.IntType(32)
    # Words of four outputs of an input, so that those of four inputs are together; then a byte of
    # each.
    words = [row * WIDTH // 4 + word for word in range(WIDTH // 4) for row in range(QUAD)]
    turned = [
        16 * lane + 4 * row + each
        for lane in range(WIDTH // 4)
        for each in range(4)
        for row in range(QUAD)
    ]
    for first in range(0, kind.group, 8):
        for begin in (0, 1):
            found = [
                builder.load(
                    builder.inttoptr(
                        further(builder, at, (first + begin + 2 * index) * PANEL), rows.as_pointer()
                    ),
                    align=1,
                )
                for index in range(QUAD)
            ]
            together = builder.bitcast(joined(builder, found), INTS)
            order = ir.Constant(ir.VectorType(half, WIDTH), words)
            lanes = builder.bitcast(
                builder.shuffle_vector(together, together, order), ir.VectorType(_BYTE, 4 * WIDTH)
            )
            order = ir.Constant(ir.VectorType(half, 4 * WIDTH), turned)
            yield builder.xor(
                builder.bitcast(builder.shuffle_vector(lanes, lanes, order), INTS),
                constant_ints(_BIAS * 0x0101_0101),
            )


def _of_halves(kind: Format, builder: Any, at: Any, above: Any) -> Iterator[Any]:
    """Yield the quads of a group whose lower four bits are in words of eight inputs.

    The upper bits of a word's first, third ... input are beside their places in the word of upper
    bits, and those of the second ... one word's byte further (`upper_place` in formats.py).
    """
    upper = None
    if kind.upper_bits:
        upper = emit_words(builder, above, kind.upper_word_bytes)
    high = (2**kind.upper_bits - 1) << 4
    for unit in range(kind.group // 8):
        words = emit_words(builder, further(builder, at, unit * PANEL * 4))
        for shift in (0, 4):
            found = _mask(builder, emit_shifted(builder, words, shift), 15)
            if kind.table:
                found = _looked_up(builder, kind.table, found)
            if upper is not None:
                moved = emit_rotated(builder, upper, [kind.upper_bits * unit + shift])
                found = builder.or_(found, _mask(builder, moved, high))
            yield found


def _of_quarters(kind: Format, builder: Any, at: Any, above: Any) -> Iterator[Any]:
    """Yield the quads of a group whose lower two bits are in words of sixteen inputs.

    A word of sixteen upper bits has those of eight inputs, and then those of the other eight one
    bit further.
    """
    upper = None
    if kind.upper_bits:
        upper = emit_words(builder, above, 2)  # bytes
        upper = builder.or_(upper, builder.shl(upper, constant_ints(16)))
    for unit in range(kind.group // 16):
        words = emit_words(builder, further(builder, at, unit * PANEL * 4))
        for index in range(QUAD):
            found = _mask(builder, emit_shifted(builder, words, 2 * index), 3)
            if upper is not None:
                moved = emit_rotated(builder, upper, [2 * index, 2 * index + 1])
                found = builder.or_(found, _mask(builder, moved, 4))
            yield found


_CHOOSERS = {  # LLVM's instruction that looks bytes up in sixteen others, by lanes of 32 bits
    16: "llvm.x86.avx512.pshuf.b.512" if "avx512bw" in target_features() else None,
    8: "llvm.x86.avx2.pshuf.b" if "avx2" in target_features() else None,
    4: "llvm.x86.ssse3.pshuf.b.128"
    if "ssse3" in target_features()
    else "llvm.aarch64.neon.tbl1.v16i8"
    if vectors().name == "NEON"
    else None,
}


def _looked_up(builder: Any, table: tuple[int, ...], places: Any) -> Any:
    """Emit the bytes of a table at places of four bits."""
    kind = ir.VectorType(_BYTE, 4 * WIDTH)
    name = _CHOOSERS.get(WIDTH)
    numbers = ir.Constant(kind, list(table) * (kind.count // len(table)))
    wanted = builder.bitcast(places, kind)
    if name is not None:
        function = ir.FunctionType(kind, [kind, kind])
        called = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.bitcast(builder.call(called, [numbers, wanted]), INTS)
    chosen = ir.Constant(kind, ir.Undefined)
    for lane in range(kind.count):
        at = ir.Constant(ir.IntType(32), lane)
        place = builder.zext(builder.extract_element(wanted, at), ir.IntType(32))
        chosen = builder.insert_element(chosen, builder.extract_element(numbers, place), at)
    return builder.bitcast(chosen, INTS)


def emit_quads(kind: Format, builder: Any, at: Any, above: Any) -> Iterator[Any]:
    """Yield the registers of a group, with four inputs of a register's outputs each.

    `at` and `above`: addresses of the outputs' lower bits and of their upper bits.
    """
    if kind.bits == 8:
        return _of_bytes(kind, builder, at)
    if kind.lower_bits == 2:  # bits
        return _of_quarters(kind, builder, at, above)
    return _of_halves(kind, builder, at, above)


def emit_codes(kind: Format, builder: Any, at: Any, above: Any, *, in_pairs: bool) -> Iterator[Any]:
    """Yield the registers of a group: `emit_quads`, or `emit_pair_codes`."""
    return (emit_pair_codes if in_pairs else emit_quads)(kind, builder, at, above)


@cache
def _writer(kind: Format, *, in_pairs: bool) -> Any:
    """Return an intrinsic that writes the codes of a group, for one register of outputs."""

    def write_bytes(typingctx: Any, out: Any, place: Any, at: Any, above: Any) -> Any:  # noqa: ARG001
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            memory, first, lower, upper = values
            for index, quad in enumerate(
                emit_codes(kind, builder, lower, upper, in_pairs=in_pairs)
            ):
                to = further(builder, first, index * PANEL * QUAD)
                pointer = address_of(context, builder, out, memory, to)
                builder.store(quad, builder.bitcast(pointer, INTS.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(out, place, at, above), code

    write_bytes.__name__ = (
        f"write_bytes_{kind.name}_{int(in_pairs)}"  # the cache tells them apart by name
    )
    return intrinsic(write_bytes)


@cache
def chunk_unpacker(kind: Format, *, in_pairs: bool = False) -> Any:
    """Compiled: unpack(panel, first, end, out, at, scales, offsets), for one format.

    It unpacks inputs `first` to `end` - 1 of the panel at an address, both multiples of 32. Bytes
    are written to `out` from element `at` on; of pairs, two for each input.
    """
    width, _, scales_of, offsets_of, *_ = unpacking(kind)
    write = _writer(kind, in_pairs=in_pairs)
    begin_group, group = group_beginner(kind, AHEAD_BYTES), kind.group
    scale_bytes, upper_bytes = kind.scale_bytes, kind.upper_bytes
    column_bytes, above_bytes = kind.unit_bytes, kind.upper_word_bytes
    columns, has_minimum = width // WIDTH, int(kind.has_minimum)
    panel_bytes = PANEL * (2 if in_pairs else 1)

    @jit(borrows=True, apart=True)
    def unpack(
        panel: int, first: int, end: int, out: Records, at: int, scales: Floats, offsets: Floats
    ) -> None:
        place, to = 0, at
        for start in range(first, end, group):
            head, scales_at = begin_group(panel, start)
            for column in range(0, PANEL, width):
                found = scales_of(head, scales_at, column)
                store_sums(scales, place + column, PANEL, found, columns)
                if has_minimum:
                    lower = offsets_of(head, scales_at, column, found)
                    store_sums(offsets, place + column, PANEL, lower, columns)
            for column in range(0, PANEL, WIDTH):
                upper = scales_at + scale_bytes + above_bytes * column
                lowest = scales_at + scale_bytes + upper_bytes + column_bytes * column
                write(out, to + QUAD * column, lowest, upper)
            place += PANEL
            to += group * panel_bytes

    return unpack
