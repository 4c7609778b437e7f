"""Instructions that make registers of float32 from small integers and float16, for numba.

They take addresses, not arrays, because panels mix number types.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.target import target_features

_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), WIDTH)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_WORD_BITS = 32
_HAS_HALVES = "f16c" in target_features()  # an instruction that widens float16

# A float16 without its sign, moved to the upper bits of a float32, has an exponent that is too
# small by 112. Below 2^-14 it has no leading one.
_FIRST_NORMAL = 1 << 10
_EXPONENTS = 112 << 23
_HALF = 126 << 23  # 0.5, whose last bit is 2^-24, the unit of small float16 values


def called(builder: Any, name: str, returns: Any, *values: Any) -> Any:
    """Emit a call of one of LLVM's instructions by its name."""
    kind = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def constant_ints(number: int) -> Any:
    return ir.Constant(_INTS, [number] * WIDTH)


def further(builder: Any, address: Any, num_bytes: int) -> Any:
    """Emit an address some bytes further."""
    return builder.add(address, address.type(num_bytes)) if num_bytes else address


def _loaded(builder: Any, address: Any, kind: Any) -> Any:
    pointer = builder.inttoptr(address, kind.as_pointer())
    return builder.load(pointer, align=1)


def emit_unsigned(builder: Any, address: Any) -> Any:
    """Emit a load of unsigned bytes as integers."""
    return builder.zext(_loaded(builder, address, _BYTES), _INTS)


def emit_signed(builder: Any, address: Any) -> Any:
    """Emit a load of signed bytes as integers."""
    return builder.sext(_loaded(builder, address, _BYTES), _INTS)


def emit_words(builder: Any, address: Any, num_bytes: int = 4) -> Any:
    """Emit a load of words of 16 or 32 bits."""
    if num_bytes == 2:  # bytes
        return builder.zext(_loaded(builder, address, _SHORTS), _INTS)
    return _loaded(builder, address, _INTS)


def emit_numbers(builder: Any, address: Any) -> Any:
    return _loaded(builder, address, _FLOATS)


def emit_powers(builder: Any, address: Any) -> Any:
    """Emit a load of bytes e, as 2^(e - 128). The first two are below the normal numbers."""
    exponents = emit_unsigned(builder, address)
    normal = builder.shl(builder.sub(exponents, constant_ints(1)), constant_ints(23))
    small = builder.shl(constant_ints(1 << 21), exponents)
    is_small = builder.icmp_unsigned("<", exponents, constant_ints(2))
    return builder.bitcast(builder.select(is_small, small, normal), _FLOATS)


def _moved(builder: Any, words: Any, first: int, to: int) -> Any:
    if first > to:
        return builder.lshr(words, constant_ints(first - to))
    return builder.shl(words, constant_ints(to - first)) if first < to else words


def emit_joined(builder: Any, parts: Sequence[tuple[Any, int, int]], to: int) -> Any:
    """Emit integers times 2^to, each joined from bits of several words.

    `parts`: words, first bit and number of bits, the lowest part first. Parts are joined at the
    place of the first one, so that one shift moves them all.
    """
    place = parts[0][1]
    if place + sum(bits for *_, bits in parts) > _WORD_BITS:
        place = to
    joined, at = None, place
    for words, first, bits in parts:
        moved = _moved(builder, words, first, at)
        moved = builder.and_(moved, constant_ints((2**bits - 1) << at))
        joined = moved if joined is None else builder.or_(joined, moved)
        at += bits
    return _moved(builder, joined, place, to)


def emit_shifted(builder: Any, words: Any, amount: int) -> Any:
    """Emit words whose bits are moved down."""
    return builder.lshr(words, constant_ints(amount)) if amount else words


def emit_rotated(builder: Any, words: Any, amounts: list[int]) -> Any:
    """Emit words whose bits are rotated to the right; `amounts` are repeated over the lanes."""
    bits = _WORD_BITS // len(amounts)
    kind = ir.VectorType(ir.IntType(bits), WIDTH * len(amounts))
    moved, by = builder.bitcast(words, kind), ir.Constant(kind, amounts * WIDTH)
    return builder.bitcast(
        called(builder, f"llvm.fshr.v{kind.count}i{bits}", kind, moved, moved, by), _INTS
    )


def emit_floats(builder: Any, ints: Any) -> Any:
    return builder.sitofp(ints, _FLOATS)


def emit_halves(builder: Any, address: Any) -> Any:
    """Emit a load of finite float16 numbers."""
    shorts = _loaded(builder, address, _SHORTS)
    if _HAS_HALVES:
        return builder.fpext(builder.bitcast(shorts, ir.VectorType(ir.HalfType(), WIDTH)), _FLOATS)
    wide = builder.zext(shorts, _INTS)
    sign = builder.shl(builder.and_(wide, constant_ints(0x8000)), constant_ints(16))
    size = builder.and_(wide, constant_ints(0x7FFF))
    normal = builder.add(builder.shl(size, constant_ints(13)), constant_ints(_EXPONENTS))
    half = constant_ints(_HALF)
    above = builder.bitcast(builder.add(size, half), _FLOATS)
    small = builder.bitcast(builder.fsub(above, builder.bitcast(half, _FLOATS)), _INTS)
    is_small = builder.icmp_unsigned("<", size, constant_ints(_FIRST_NORMAL))
    bits = builder.or_(builder.select(is_small, small, normal), sign)
    return builder.bitcast(bits, _FLOATS)


@intrinsic  # type: ignore[untyped-decorator]
def table_at(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """Convert an address to a pointer to int64."""
    kind = types.CPointer(types.int64)

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return kind(address), code


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_at(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """Prefetch the cache line at an address."""

    def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        number = ir.IntType(32)
        pointer = builder.inttoptr(values[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, second_level, data = (ir.Constant(number, each) for each in (0, 2, 1))
        builder.call(function, [pointer, to_read, second_level, data])
        return context.get_dummy_value()

    return types.none(address), code
