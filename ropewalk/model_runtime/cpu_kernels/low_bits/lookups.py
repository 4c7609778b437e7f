"""Instructions that look numbers of four bits up in a table of sixteen, for numba.

With AVX-512, one instruction chooses among the sixteen floats of a register. Otherwise one
chooses among sixteen bytes, with AVX2, SSSE3 or NEON, and their integers are converted. For that
a table begins with 0: the upper three bytes of a lane are 0 and stay so.
"""

from typing import Any

from llvmlite import ir

from ropewalk.model_runtime.cpu_kernels.low_bits.loads import called, constant_ints, emit_floats
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.target import target_features, vectors

_INT = ir.IntType(32)
_LANE_BYTES = 4
_CHOOSERS = {  # of bytes: the size of a register -> LLVM's name
    32: "llvm.x86.avx2.pshuf.b" if "avx2" in target_features() else None,
    16: "llvm.x86.ssse3.pshuf.b.128"
    if "ssse3" in target_features()
    else "llvm.aarch64.neon.tbl1.v16i8"
    if vectors().name == "NEON"
    else None,
}
# Numbers are floats at once, and `zero` is already subtracted.
HAS_FLOAT_TABLES = vectors().name == "AVX-512"


def emit_looked_up(builder: Any, table: tuple[int, ...], zero: int, words: Any, first: int) -> Any:
    """Emit the numbers of a table, as floats, for the four bits of words from bit `first` on.

    `zero` is subtracted from them.
    """
    if first:
        words = builder.lshr(words, constant_ints(first))
    if HAS_FLOAT_TABLES:
        floats = ir.VectorType(ir.FloatType(), WIDTH)
        numbers = ir.Constant(floats, [float(each - zero) for each in table])
        # It reads the lowest four bits of each lane.
        return called(builder, "llvm.x86.avx512.permvar.sf.512", floats, numbers, words)
    places = builder.and_(words, constant_ints(15))
    numbers = _chosen(builder, table, places, WIDTH)
    if zero:
        numbers = builder.sub(numbers, constant_ints(zero))
    return emit_floats(builder, numbers)


def _chosen(builder: Any, table: tuple[int, ...], places: Any, width: int) -> Any:
    """Emit the integers of a table at `places`, which are `width` lanes."""
    size = width * _LANE_BYTES
    name = _CHOOSERS.get(size)
    if name is None and size > min(_CHOOSERS):
        return _by_halves(builder, table, places, width)
    if name is None:
        return _one_by_one(builder, table, places, width)
    kind = ir.VectorType(ir.IntType(8), size)
    repeated = ir.Constant(kind, list(table) * (size // len(table)))
    chosen = called(builder, name, kind, repeated, builder.bitcast(places, kind))
    return builder.bitcast(chosen, places.type)


def _by_halves(builder: Any, table: tuple[int, ...], places: Any, width: int) -> Any:
    half = width // 2

    def lanes(first: int, count: int) -> Any:
        return ir.Constant(ir.VectorType(_INT, count), list(range(first, first + count)))

    parts = [builder.shuffle_vector(places, places, lanes(at, half)) for at in (0, half)]
    chosen = [_chosen(builder, table, each, half) for each in parts]
    return builder.shuffle_vector(*chosen, lanes(0, width))


def _one_by_one(builder: Any, table: tuple[int, ...], places: Any, width: int) -> Any:
    """Emit lookups for a processor without an instruction for it."""
    numbers = ir.Constant(ir.VectorType(_INT, len(table)), list(table))
    chosen = ir.Constant(places.type, ir.Undefined)
    for lane in range(width):
        at = ir.Constant(_INT, lane)
        number = builder.extract_element(numbers, builder.extract_element(places, at))
        chosen = builder.insert_element(chosen, number, at)
    return chosen
