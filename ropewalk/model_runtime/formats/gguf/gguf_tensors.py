"""Read a file's tensors, dequantised a piece at a time.

A whole tensor is never held in float32, only a piece of its rows.

Shapes: N = rows, B = blocks of a row.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.ggml import dequantised
from ropewalk.model_runtime.formats.gguf.gguf_blocks import Blocks, unpacked
from ropewalk.model_runtime.formats.gguf.gguf_file import TensorInfo

if TYPE_CHECKING:
    import torch

Values = np.ndarray[Any, Any]
# 64 KiB in float32, which stay in a core's cache. torch copies more than 32,768 numbers with all
# its threads. On two cores with other work, that made a load of 106 M weights 3 times slower.
_PIECE_VALUES = 1 << 14
_MOST_EXPONENT = 252  # of MXFP4: twelve times 2^(253 - 128) is not finite in float32
_ROWS = 64  # of a piece of unpacked numbers, or a multiple of them


def read_values(info: TensorInfo) -> Values:
    """Return a small tensor in float32. Raises ModelError if it has NaN or Inf."""
    pieces = [piece for _, piece in _pieces(info, None)]
    return np.concatenate(pieces).reshape(info.shape)


def read_tensor(
    info: TensorInfo,
    dtype: "torch.dtype",
    *,
    row_order: Values | None = None,
    offset: float = 0.0,
) -> "torch.Tensor":
    """Return a tensor in a number type of torch. Raises ModelError if it has NaN or Inf.

    Row i of the result is row `row_order[i]` of the file. `offset` is added in float32.
    """
    import torch  # noqa: PLC0415  # planning reads no weights

    found = torch.empty(info.num_rows, info.shape[-1], dtype=dtype)
    for first, piece in _pieces(info, None if len(info.shape) == 1 else row_order):
        if offset:
            piece = piece + np.float32(offset)  # noqa: PLW2901
        found[first : first + len(piece)] = torch.from_numpy(piece)
    if dtype == torch.float16 and not bool(found.isfinite().all()):
        raise ModelError(f"{info.path}: tensor {info.name} is too large for float16; use bfloat16")
    found = found.reshape(info.shape)
    if len(info.shape) == 1 and row_order is not None:
        found = found[torch.from_numpy(row_order)]
    return found


def read_blocks(
    info: TensorInfo, row_order: Values | None = None, of: range | None = None
) -> Iterator[tuple[int, Blocks]]:
    """Yield the first row and the unpacked numbers of each piece of rows.

    A piece has a multiple of 64 rows, but for the last. `row_order` is as in `read_tensor`. `of`:
    the rows to read, of which the first is row 0. Raises ModelError if a factor is NaN or Inf.
    """
    raw = _mapped(info)
    if of is not None:
        raw = raw[of.start : of.stop]
    step = max(1, _PIECE_VALUES // info.shape[-1] // _ROWS) * _ROWS
    for first in range(0, len(raw), step):
        rows = slice(first, first + step)
        found = unpacked(raw[rows if row_order is None else row_order[rows]], info.type_name)
        for factors in (found.factors_NB, found.minima_NB):
            if factors is not None and not are_finite(factors):
                raise ModelError(f"{info.path}: tensor {info.name} has NaN or Inf")
        yield first, found


def are_finite(factors: Values) -> bool:
    if factors.dtype == np.uint8:
        return int(factors.max(initial=0)) <= _MOST_EXPONENT
    return bool(np.isfinite(factors).all())


def _mapped(info: TensorInfo) -> Values:
    return np.memmap(
        info.path, np.uint8, "r", offset=info.offset, shape=(info.num_rows, info.row_bytes)
    )


def _pieces(info: TensorInfo, row_order: Values | None) -> Iterator[tuple[int, Values]]:
    """Yield the first row and the float32 values of each piece of rows."""
    raw = _mapped(info)
    step = max(1, _PIECE_VALUES // info.shape[-1])
    for first in range(0, info.num_rows, step):
        rows = slice(first, first + step)
        piece = dequantised(raw[rows if row_order is None else row_order[rows]], info.type_name)
        if not bool(np.isfinite(piece).all()):
            raise ModelError(f"{info.path}: tensor {info.name} has NaN or Inf")
        yield first, np.array(piece, np.float32)  # a copy: torch refuses views of a read-only file
