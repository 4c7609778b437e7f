"""The numbers inside a file's quantised blocks, unpacked without being multiplied.

Source of the layouts: `ggml-common.h` and `dequantize_row_*` of ggml.

Shapes: N = rows, K = inputs, B = blocks of a row, G = groups of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# MXFP4's numbers are 0, 1, 2, 3, 4, 6, 8 and 12, then the same with a minus: places by size.
MXFP4_ORDER = np.array([*range(8, 16), *range(7, -1, -1)], np.uint8)


class Blocks(NamedTuple):
    """The numbers of rows; a weight is factor * q, or factor * scale * q - minimum.

    q is int8 in Q8_0. Otherwise it is uint8, and too large by 4 (Q3_K), 8 (Q4_0), 16 (Q5_0) or 32
    (Q6_K). In IQ4 types and MXFP4 it is a place in the ascending order of the type's numbers.
    """

    q_NK: NDArray[Any]
    factors_NB: NDArray[Any]  # float16; MXFP4: uint8, exponents of two that are too large by 128
    minima_NB: NDArray[np.float16] | None = None  # factors of group minima, if there are any
    scales_NG: NDArray[Any] | None = None  # uint8 beside minima, otherwise int8
    group_minima_NG: Bytes | None = None


def unpacked(rows: Bytes, type_name: str) -> Blocks:
    """Return the numbers of rows of bytes, [N, bytes]; `type_name` is one of UNPACKED."""
    return _UNPACK[type_name](rows)


def _blocks(rows: Bytes, size: int) -> Bytes:
    return np.ascontiguousarray(rows).reshape(len(rows), -1, size)


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """Return the lower, then the upper four bits of bytes: [..., J] -> [..., 2J]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q8_0(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 34)
    q = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Blocks(q.reshape(len(rows), -1), _halves(blocks, 0))


def _q4_0(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 18)
    return Blocks(_nibbles(blocks[..., 2:]).reshape(len(rows), -1), _halves(blocks, 0))


def _q4_1(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 20)
    q = _nibbles(blocks[..., 4:]).reshape(len(rows), -1)
    return Blocks(q, _halves(blocks, 0), -_halves(blocks, 2))


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight scales and eight minima that twelve bytes hold in six bits each."""
    low, high, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = [low & 63, (both & 15) | (low >> 6 << 4)]
    minima = [high & 63, (both >> 4) | (high >> 6 << 4)]
    return np.concatenate(scales, axis=-1), np.concatenate(minima, axis=-1)


def _q4_k(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 144)
    packed = blocks[..., 16:].reshape(len(rows), -1, 4, 32)
    return _with_minima(rows, blocks, _nibbles(packed))


def _q5_k(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 176)
    shape = len(rows), -1, 4, 2, 32
    lower = _nibbles(blocks[..., 48:].reshape(len(rows), -1, 4, 32)).reshape(shape)
    places = np.arange(8, dtype=np.uint8).reshape(4, 2, 1)
    upper = (blocks[..., None, None, 16:48] >> places) & 1
    q: Any = lower | (upper << 4)
    return _with_minima(rows, blocks, q)


def _with_minima(rows: Bytes, blocks: Bytes, q: Bytes) -> Blocks:
    scales, minima = (each.reshape(len(rows), -1) for each in _six_bits(blocks[..., 4:16]))
    factors = _halves(blocks, 0), _halves(blocks, 2)
    return Blocks(q.reshape(len(rows), -1), *factors, scales, minima)


def _q6_k(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 210)
    lower = _nibbles(blocks[..., :128].reshape(len(rows), -1, 2, 64)).reshape(
        len(rows), -1, 2, 4, 32
    )
    places = (2 * np.arange(4, dtype=np.uint8)).reshape(4, 1)
    upper = (blocks[..., 128:192].reshape(len(rows), -1, 2, 1, 32) >> places) & 3
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    q = (lower | (upper << 4)).reshape(len(rows), -1)
    return Blocks(q, _halves(blocks, 208), None, scales.reshape(len(rows), -1))


def _fives(lower: Bytes, upper: Bytes) -> Bytes:
    """Return numbers of five bits, [N, B, 32], from nibbles and the bits of four bytes."""
    above: Any = np.unpackbits(upper, axis=-1, bitorder="little")
    q: Bytes = _nibbles(lower) | (above << 4)
    return q


def _q5_0(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 22)
    q = _fives(blocks[..., 6:], blocks[..., 2:6])
    return Blocks(q.reshape(len(rows), -1), _halves(blocks, 0))


def _q5_1(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 24)
    q = _fives(blocks[..., 8:], blocks[..., 4:8])
    return Blocks(q.reshape(len(rows), -1), _halves(blocks, 0), -_halves(blocks, 2))


def _twos(packed: Bytes) -> Bytes:
    """Return numbers of two bits: a byte has those of inputs that are 32 apart. [N, B, 256]."""
    places = (2 * np.arange(4, dtype=np.uint8)).reshape(4, 1)
    split: Any = (packed.reshape(*packed.shape[:-1], 2, 1, 32) >> places) & 3
    q: Bytes = split.reshape(*packed.shape[:-1], 256)
    return q


def _q2_k(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 84)
    q = _twos(blocks[..., 16:80])
    both: Any = blocks[..., :16].reshape(len(rows), -1)
    factors = _halves(blocks, 80), _halves(blocks, 82)
    return Blocks(q.reshape(len(rows), -1), *factors, both & 15, both >> 4)


def _q3_k(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 110)
    places = np.arange(8, dtype=np.uint8).reshape(8, 1)
    upper: Any = (blocks[..., None, :32] >> places) & 1
    q: Any = _twos(blocks[..., 32:96]) | (upper.reshape(*blocks.shape[:2], 256) << 2)
    pairs = (2 * np.arange(4, dtype=np.uint8)).reshape(4, 1)
    above: Any = (blocks[..., None, 104:108] >> pairs) & 3
    scales: Any = _nibbles(blocks[..., 96:104]) | (above.reshape(*blocks.shape[:2], 16) << 4)
    signed = scales.reshape(len(rows), -1).astype(np.int8) - np.int8(32)
    return Blocks(q.reshape(len(rows), -1), _halves(blocks, 108), None, signed)


def _iq4_xs(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 136)
    q = _nibbles(blocks[..., 8:].reshape(len(rows), -1, 16))
    upper = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
    above = (upper >> (2 * np.arange(8, dtype=np.uint16))) & 3
    pairs = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15
    scales = pairs.reshape(above.shape) | (above.astype(np.uint8) << 4)
    signed = scales.reshape(len(rows), -1).astype(np.int8) - np.int8(32)
    return Blocks(q.reshape(len(rows), -1), _halves(blocks, 0), None, signed)


def _mxfp4(rows: Bytes) -> Blocks:
    blocks = _blocks(rows, 17)
    q = MXFP4_ORDER[_nibbles(blocks[..., 1:])]
    return Blocks(q.reshape(len(rows), -1), np.ascontiguousarray(blocks[..., 0]))


_UNPACK: dict[str, Callable[[Bytes], Blocks]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,  # a factor and nibbles, too
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
UNPACKED = tuple(_UNPACK)
