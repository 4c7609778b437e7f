"""Sums of products of small integers: four unsigned bytes times four signed bytes in each lane.

The sums are exact, so every processor has the same ones. VNNI adds the products of four pairs in
one instruction. Older processors add two, in sixteen bits, which unsigned bytes up to 129 cannot
overflow; larger ones are widened first. The rest compute in lanes of 32 bits.

Shapes: R = rows and C = registers of a tile, as in `register_sums.py`. A quad is four neighbouring
bytes of a lane.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.target import target_features

MOST_CODE = 127  # magnitude of a signed byte
_MOST_SHORT = 32_767
_INT, _SHORT, _BYTE = ir.IntType(32), ir.IntType(16), ir.IntType(8)
INTS = ir.VectorType(_INT, WIDTH)
_SHORTS, _BYTES = ir.VectorType(_SHORT, 2 * WIDTH), ir.VectorType(_BYTE, 4 * WIDTH)
_TYPED_BYTES = 22  # since this version LLVM's VNNI takes vectors of bytes

Registers = list[Any]


def _vnni() -> tuple[str, str] | None:
    """Return LLVM's name of the instruction of four pairs, and the banner's; None without it."""
    features = target_features()
    if WIDTH == 16 and "avx512vnni" in features:
        return "llvm.x86.avx512.vpdpbusd.512", "AVX512_VNNI"
    if WIDTH == 8 and "avxvnni" in features:
        return "llvm.x86.avx512.vpdpbusd.256", "AVX_VNNI"
    return None


def _pairs() -> tuple[str, str, str] | None:
    """Return LLVM's names of products of pairs of bytes and of shorts, and the banner's."""
    features = target_features()
    if WIDTH == 16 and "avx512bw" in features:
        return "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512", "AVX512BW"
    if WIDTH == 8 and "avx2" in features:
        return "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd", "AVX2"
    if WIDTH == 4 and "ssse3" in features:
        return "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd", "SSSE3"
    return None


_VNNI, _PAIRS = _vnni(), _pairs()
MULTIPLIES_BYTES = _VNNI is not None  # four pairs in one instruction
INSTRUCTION = _VNNI[1] if _VNNI else _PAIRS[2] if _PAIRS else "plain integers"


def num_shorts(most: int) -> int:
    """Return how many products of pairs fit one sum of sixteen bits; 0: none, or not needed.

    `most`: the largest unsigned byte.
    """
    return 0 if _VNNI or not _PAIRS else _MOST_SHORT // (2 * MOST_CODE * most)


def _called(builder: Any, name: str, returns: Any, *values: Any) -> Any:
    kind = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _constant(kind: Any, number: int) -> Any:
    return ir.Constant(kind, [number] * kind.count)


def emit_dots(
    builder: Any,
    sums: Registers,
    num_quads: int,
    shorts: int,
    weights_at: Callable[[int], Registers],
    rows_at: Callable[[int], Registers],
) -> Registers:
    """Emit R x C sums of integers, to which the products of all quads are added.

    `weights_at` emits the C registers of a quad's unsigned bytes, and `rows_at` the R registers of
    its signed bytes. `shorts`: see `num_shorts`.
    """
    if shorts:
        return _in_shorts(builder, sums, num_quads, shorts, weights_at, rows_at)
    for quad in range(num_quads):
        weights, rows = weights_at(quad), rows_at(quad)
        if _VNNI:
            step = _in_fours(builder, sums, weights, rows)
        elif _PAIRS:
            step = _widened(builder, sums, weights, rows)
        else:
            step = _one_by_one(builder, sums, weights, rows)
        sums = step
    return sums


def _in_fours(builder: Any, sums: Registers, weights: Registers, rows: Registers) -> Registers:
    assert _VNNI is not None
    kind = _BYTES if binding.llvm_version_info[0] >= _TYPED_BYTES else INTS
    weights, rows = ([builder.bitcast(each, kind) for each in many] for many in (weights, rows))
    pairs = [(weight, row) for row in rows for weight in weights]
    return [
        _called(builder, _VNNI[0], INTS, before, *pair)
        for before, pair in zip(sums, pairs, strict=True)
    ]


def _in_shorts(
    builder: Any, sums: Registers, num_quads: int, shorts: int,
    weights_at: Callable[[int], Registers], rows_at: Callable[[int], Registers],
) -> Registers:  # fmt: skip
    """Emit sums of pairs in sixteen bits, and add them to sums of 32 bits before they overflow."""
    assert _PAIRS is not None
    for first in range(0, num_quads, shorts):
        part: Registers = []
        for quad in range(first, min(num_quads, first + shorts)):
            weights, rows = weights_at(quad), rows_at(quad)
            found = [
                _called(
                    builder, _PAIRS[0], _SHORTS,
                    builder.bitcast(weight, _BYTES), builder.bitcast(row, _BYTES),
                )
                for row in rows
                for weight in weights
            ]  # fmt: skip
            part = [builder.add(*two) for two in zip(part, found, strict=True)] if part else found
        sums = _widely(builder, sums, [(each, _constant(_SHORTS, 1)) for each in part])
    return sums


def _widely(builder: Any, sums: Registers, pairs: list[tuple[Any, Any]]) -> Registers:
    """Emit sums of 32 bits to which products of pairs of shorts are added."""
    assert _PAIRS is not None
    return [
        builder.add(before, _called(builder, _PAIRS[1], INTS, *pair))
        for before, pair in zip(sums, pairs, strict=True)
    ]


def _widened(builder: Any, sums: Registers, weights: Registers, rows: Registers) -> Registers:
    """Emit sums of bytes that are widened to shorts: the even ones, and the odd ones."""
    eight = _constant(_SHORTS, 8)
    weights, rows = ([builder.bitcast(each, _SHORTS) for each in many] for many in (weights, rows))
    even = [builder.and_(each, _constant(_SHORTS, 0xFF)) for each in weights]
    odd = [builder.lshr(each, eight) for each in weights]
    even_rows = [builder.ashr(builder.shl(each, eight), eight) for each in rows]
    odd_rows = [builder.ashr(each, eight) for each in rows]
    for many, those in ((even, even_rows), (odd, odd_rows)):
        sums = _widely(builder, sums, [(weight, row) for row in those for weight in many])
    return sums


def _one_by_one(builder: Any, sums: Registers, weights: Registers, rows: Registers) -> Registers:
    top = _constant(INTS, 24)
    for place in range(0, 32, 8):
        low, high = _constant(INTS, place), _constant(INTS, 24 - place)
        many = [builder.and_(builder.lshr(each, low), _constant(INTS, 0xFF)) for each in weights]
        those = [builder.ashr(builder.shl(each, high), top) for each in rows]
        pairs = [(weight, row) for row in those for weight in many]
        sums = [
            builder.add(before, builder.mul(*pair))
            for before, pair in zip(sums, pairs, strict=True)
        ]
    return sums
