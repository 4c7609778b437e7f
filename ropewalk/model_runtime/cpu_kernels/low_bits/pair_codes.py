"""Weights of few bits as pairs of bfloat16 integers, for products in pairs (AVX512_BF16).

A weight is `scale * code`, plus an offset in formats with minima. A code has at most eight
significant bits, so it is exact in bfloat16. One instruction looks up the codes of sixteen pairs
in a table, by the five or six lowest bits of each number of sixteen bits. Bits above those need no
mask.

A word of few bits holds the inputs of a pair half a word from each other. `ORDERS` in
`paired_rows.py` are these orders of inputs.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import PANEL, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import (
    called,
    constant_ints,
    emit_floats,
    emit_rotated,
    emit_shifted,
    emit_signed,
    emit_words,
    further,
)
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH

_INTS = ir.VectorType(ir.IntType(32), WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), 2 * WIDTH)
_TABLE = 32  # numbers of sixteen bits in a register
_LOOK_UP = "llvm.x86.avx512.permvar.hi.512"
_LOOK_UP_IN_TWO = "llvm.x86.avx512.vpermi2var.hi.512"


def _codes(kind: Format) -> list[int]:
    zero = 0 if kind.has_minimum else kind.zero
    numbers = kind.table or range(2**kind.bits)
    return [number - zero for number in numbers]


def _table(codes: Sequence[int]) -> Any:
    """Return a register of codes in bfloat16, repeated."""
    repeated = [codes[at % len(codes)] for at in range(_TABLE)]
    bits = [struct.unpack("<2h", struct.pack("<f", float(each)))[1] for each in repeated]
    return ir.Constant(_SHORTS, bits)


def _looked_up(builder: Any, codes: Sequence[int], places: Any) -> Any:
    """Emit the codes of sixteen pairs; `places` has a q in the lowest bits of each half."""
    values = [_table(codes[:_TABLE]), builder.bitcast(places, _SHORTS)]
    name = _LOOK_UP
    if len(codes) > _TABLE:
        values.append(_table(codes[_TABLE:]))
        name = _LOOK_UP_IN_TWO
    return builder.bitcast(called(builder, name, _SHORTS, *values), _INTS)


def _of_bytes(kind: Format, builder: Any, at: Any) -> Iterator[Any]:
    """Yield the pairs of a group of whole bytes: inputs j and j + 4 of each eight."""
    for first in range(0, kind.group, 8):
        for j in range(first, first + 4):
            low, high = (
                builder.bitcast(
                    emit_floats(builder, emit_signed(builder, further(builder, at, k * PANEL))),
                    _INTS,
                )
                for k in (j, j + 4)
            )
            # An integer of eight bits has zeros in the lower half of its float.
            yield builder.or_(emit_shifted(builder, low, 16), high)


def emit_pair_codes(kind: Format, builder: Any, at: Any, above: Any) -> Iterator[Any]:
    """Yield the registers of a group, with a pair of codes of a register's outputs each.

    `at` and `above`: addresses of the outputs' lower bits and of their upper bits.
    """
    if kind.bits == 8:
        yield from _of_bytes(kind, builder, at)
        return
    codes, lower, size = _codes(kind), kind.lower_bits, kind.unit_inputs
    upper = None
    if kind.upper_bits:
        upper = emit_words(builder, above, kind.upper_word_bytes)
        if kind.upper_word_bytes == 2:  # bytes
            upper = builder.or_(upper, builder.shl(upper, constant_ints(16)))
    lowest = (2**lower - 1) * 0x0001_0001
    for unit in range(kind.group // size):
        words = emit_words(builder, further(builder, at, unit * PANEL * kind.unit_bytes))
        for j in range(size // 2):
            places = emit_shifted(builder, words, lower * j)
            if upper is not None:
                # Upper bits are moved to their places above the lower ones (`upper_place`).
                amounts = (
                    [kind.upper_bits * unit + lower * j]
                    if kind.upper_word_bytes == 4  # bytes
                    else [lower * j, lower * j + 1]
                )
                moved = builder.and_(
                    emit_rotated(builder, upper, amounts), constant_ints(0xFFFF_FFFF ^ lowest)
                )
                places = builder.or_(builder.and_(places, constant_ints(lowest)), moved)
            yield _looked_up(builder, codes, places)
