"""The numbers inside a file's quantised blocks, unpacked without being multiplied.

Source of the layouts: `ggml-common.h` and `dequantize_row_*` of ggml.

Shapes: N = rows, K = inputs, B = blocks of a row, G = groups of a row.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

UNPACKED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


class Blocks(NamedTuple):
    """The numbers of rows; a weight is factor * q, or factor * scale * q - minimum."""

    q_NK: NDArray[Any]  # int8 in Q8_0; otherwise uint8, 8 too large in Q4_0, 32 in Q6_K
    factors_NB: NDArray[np.float16]
    minima_NB: NDArray[np.float16] | None = None  # factors of group minima, if there are any
    scales_NG: NDArray[Any] | None = None  # int8 in Q6_K, uint8 in Q4_K and Q5_K
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


_UNPACK = dict(zip(UNPACKED, (_q8_0, _q4_0, _q4_1, _q4_k, _q5_k, _q6_k), strict=True))
