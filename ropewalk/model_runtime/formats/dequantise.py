"""Compute weights from stored values, scales and zero points: w = (q - z) * s.

The arithmetic is in float32, and the product is rounded once to the served number type. Products
of int4 or int8 with scales in float16 or bfloat16 are exact in float32.

Shapes: E = experts, O = outputs, I = inputs, G = groups of inputs, W = words of 32 bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ropewalk.model_runtime.formats.quantised_inventory import Inventory, QuantisedWeight
from ropewalk.model_runtime.formats.quantised_scheme import Grid

_MOST_ELEMENTS = 1 << 19  # held in float32 at a time
# AWQ's order of the eight values of a word, beginning with the lowest bits (AutoAWQ, gemm).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# E2M1 by its four bits (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (*_E2M1, *(-each for each in _E2M1))

Parts = Mapping[str, torch.Tensor]


def dequantise(weight: QuantisedWeight, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in a number type, from the stored tensors of its roles."""
    out = torch.empty(weight.shape, dtype=dtype)
    match weight.group.layout:
        case "mxfp4":
            _fill_mxfp4(out, parts)
        case "gptq" | "awq":
            _fill_transposed(out, weight, parts)
        case "packed":
            _fill_packed(out, weight, parts)
        case "fp8" | "int8":
            _fill_eight_bits(out, weight, parts)
    return out


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values [..., W * 32 / bits] of words [..., W] as int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are exponents of two with a bias of 127 (E8M0)."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Scales or zero points [rows of cells, columns of cells] of a weight [O, I] in float32."""

    cells: torch.Tensor
    grid: Grid
    order: torch.Tensor | None = None  # the cell of each input; None: they follow each other

    def of_rows(self, first: int, end: int, num_columns: int) -> torch.Tensor:
        """Return the cells of some rows, as wide as the weight or of one column.

        `first` is a multiple of the grid's rows.
        """
        cells, grid = self.cells, self.grid
        if grid.rows:
            cells = cells[first // grid.rows : -(-end // grid.rows)]
            cells = cells.repeat_interleave(grid.rows, dim=0)[: end - first]
        if self.order is not None:
            return cells[:, self.order]
        if grid.columns:
            cells = cells.repeat_interleave(grid.columns, dim=1)[:, :num_columns]
        return cells


def _fill_eight_bits(out: torch.Tensor, weight: QuantisedWeight, parts: Parts) -> None:
    num_rows, num_columns = out.shape[-2:]
    cells = (-1, *weight.grid.shape(num_rows, num_columns))
    scale_EGG = exponents(parts["scale"]).reshape(cells)
    zero_EGG = torch.zeros_like(scale_EGG)
    if "zero_point" in parts:
        zero_EGG = parts["zero_point"].to(torch.float32).reshape(cells)
    values_EOI = parts["values"].reshape(-1, num_rows, num_columns)
    for out_OI, values_OI, scale_GG, zero_GG in zip(
        out.reshape(-1, num_rows, num_columns), values_EOI, scale_EGG, zero_EGG, strict=True
    ):

        def read(first: int, end: int, values_OI: torch.Tensor = values_OI) -> torch.Tensor:
            return values_OI[first:end].to(torch.float32)

        scale = _Cells(scale_GG, weight.grid)
        zero = _Cells(zero_GG, weight.grid) if "zero_point" in parts else None
        _fill_rows(out_OI, read, scale, zero)


def _fill_packed(out: torch.Tensor, weight: QuantisedWeight, parts: Parts) -> None:
    num_rows, num_columns = out.shape
    bits, half = weight.group.bits, 1 << (weight.group.bits - 1)
    cells = weight.grid.shape(num_rows, num_columns)
    zero, order = parts.get("zero_point"), _order(parts)
    if zero is not None and zero.dtype == torch.int32:  # words along the rows
        zero = unpack(zero.T.contiguous(), bits).T[: cells[0]] - half

    def read(first: int, end: int) -> torch.Tensor:
        values = unpack(parts["values"][first:end], bits)[:, :num_columns] - half
        return values.to(torch.float32)

    _fill_rows(
        out,
        read,
        _Cells(parts["scale"].to(torch.float32).reshape(cells), weight.grid, order),
        None if zero is None else _Cells(zero.to(torch.float32), weight.grid, order),
    )


def _fill_transposed(out: torch.Tensor, weight: QuantisedWeight, parts: Parts) -> None:
    """Fill a weight [O, I] from values with inputs first, some outputs at a time."""
    bits, is_awq = weight.group.bits, weight.group.layout == "awq"
    per_word = 32 // bits
    scale_OG = parts["scale"].to(torch.float32).T
    zero_GO = unpack(parts["zero_point"], bits)
    if is_awq:
        zero_GO = _awq_sorted(zero_GO)
    # AutoGPTQ, which writes format 1, keeps the sum to the same number of bits.
    zero_GO = (zero_GO + weight.group.zero_offset) & ((1 << bits) - 1)
    zero_OG = zero_GO.T[: scale_OG.shape[0]].to(torch.float32)
    order = _order(parts)

    def read(first: int, end: int) -> torch.Tensor:
        if is_awq:
            words_IW = parts["values"][:, first // per_word : -(-end // per_word)]
            values_IO = _awq_sorted(unpack(words_IW, bits))
            return values_IO.T[: end - first].to(torch.float32)
        words_OW = parts["values"][:, first:end].T.contiguous()
        return unpack(words_OW, bits).to(torch.float32)

    scale = _Cells(scale_OG, weight.grid, order)
    _fill_rows(out, read, scale, _Cells(zero_OG, weight.grid, order), per_word)


def _fill_mxfp4(out_EIO: torch.Tensor, parts: Parts) -> None:
    """Fill the experts one by one; the lower half of a byte is the first value."""
    values = torch.tensor(_FP4)
    for index, out_IO in enumerate(out_EIO):
        bytes_OGB = parts["values"][index].to(torch.int32)
        pairs = torch.stack((bytes_OGB & 15, bytes_OGB >> 4), dim=-1)
        scale_OG = exponents(parts["scale"][index])
        blocks_OG32 = values[pairs].flatten(-2) * scale_OG.unsqueeze(-1)
        out_IO.copy_(blocks_OG32.flatten(-2).T)


def _order(parts: Parts) -> torch.Tensor | None:
    return parts["order"].long() if "order" in parts else None


def _awq_sorted(values: torch.Tensor) -> torch.Tensor:
    words = values.reshape(*values.shape[:-1], -1, len(_AWQ_ORDER))
    inverse = [_AWQ_ORDER.index(each) for each in range(len(_AWQ_ORDER))]
    return words[..., inverse].flatten(-2)


def _fill_rows(
    out_OI: torch.Tensor,
    read: Callable[[int, int], torch.Tensor],
    scale: _Cells,
    zero: _Cells | None,
    rows_per_word: int = 1,
) -> None:
    """Fill a weight some rows at a time. Pieces begin at whole words and at rows of cells."""
    num_rows, num_columns = out_OI.shape
    multiple = math.lcm(rows_per_word, scale.grid.rows or 1)
    step = max(multiple, _MOST_ELEMENTS // num_columns // multiple * multiple)
    for first in range(0, num_rows, step):
        end = min(num_rows, first + step)
        values_OI = read(first, end)
        if zero is not None:
            values_OI -= zero.of_rows(first, end, num_columns)
        values_OI *= scale.of_rows(first, end, num_columns)
        out_OI[first:end] = values_OI


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A weight that is computed when it is indexed by `...`, as transformers does with slices."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the weight; `index` is `...`."""
        return self.read()[index]


@contextmanager
def open_weights(
    paths: Sequence[Path], inventory: Inventory, dtype: torch.dtype
) -> Iterator[Mapping[str, Any]]:
    """Give what transformers takes for the tensors of a checkpoint that was not quantised.

    Dequantised weights have the number type `dtype`. Other tensors are slices of the files. All
    are computed when they are indexed, so experts that transformers joins are not held twice.
    """
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in paths}
        found: dict[str, Any] = {
            weight.name: LazyWeight(partial(_read, files, weight, dtype))
            for weight in inventory.quantised
        }
        found |= {each.name: files[each.path].get_slice(each.name) for each in inventory.plain}
        yield found


def _read(files: Mapping[Path, Any], weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    roles = weight.parts.items()
    parts = {role: files[part.path].get_tensor(part.name) for role, part in roles}
    return dequantise(weight, parts, dtype)
