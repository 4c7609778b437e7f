"""Read quantised weights of safetensors as codes, and dequantise them: w = (q - z) * s.

Products of int4 or int8 with scales in float16 or bfloat16 are exact in float32.

Shapes: E = experts, O = outputs, I = inputs, G = groups of inputs, W = words of 32 bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ropewalk.model_runtime.formats.codes import Cells, Codes, packed, unpacked
from ropewalk.model_runtime.formats.quantised_inventory import Inventory, QuantisedWeight
from ropewalk.model_runtime.formats.quantised_scheme import Grid

_MOST_ELEMENTS = 1 << 19  # held in float32 at a time
_MOST_ON_A_GPU = 1 << 24  # whose launches take longer than its memory
# AWQ's order of the eight values of a word, beginning with the lowest bits (AutoAWQ, gemm).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# E2M1 by its four bits (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*_E2M1, *(-each for each in _E2M1))

_DTYPES = {  # by safetensors' names
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F64": torch.float64,
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

Parts = Mapping[str, torch.Tensor]


def dequantise(weight: QuantisedWeight, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in a number type, from the stored tensors of its roles."""
    out = torch.empty(weight.shape, dtype=dtype)
    codes = codes_of(weight, parts)
    if out.dim() == 2:
        codes.fill(out, _MOST_ELEMENTS)
        return out
    is_transposed = weight.group.layout == "mxfp4"
    for index, matrix in enumerate(out):
        codes.expert(index).fill(matrix.T if is_transposed else matrix, _MOST_ELEMENTS)
    return out


def codes_of(weight: QuantisedWeight, parts: Parts) -> Codes:
    """Return the codes of a weight from the stored tensors of its roles, on their device.

    They take the bytes of the file. The experts of MXFP4 are [E, O, I], as in the file.
    """
    name = str(weight.group)
    match weight.group.layout:
        case "mxfp4":
            blocks_EOGB = parts["values"]
            scale = Cells(parts["scale"].view(torch.float8_e8m0fnu), 1, 32)
            table = torch.tensor(FP4).to(blocks_EOGB.device)
            shape = weight.shape[2], weight.shape[1]
            return Codes(name, 4, *shape, blocks_EOGB.flatten(-2), (scale,), table=table)
        case "fp8" | "int8":
            num_rows, num_columns = weight.shape[-2:]
            cells = (*weight.shape[:-2], *weight.grid.shape(num_rows, num_columns))
            scale = _cells(_exponents(parts["scale"]).reshape(cells), weight.grid)
            zero: Cells | int = 0
            if "zero_point" in parts:
                zero = _cells(parts["zero_point"].reshape(cells), weight.grid)
            return Codes(name, 8, num_rows, num_columns, parts["values"], (scale,), zero=zero)
        case "packed":
            return _packed_codes(name, weight, parts)
        case "gptq" | "awq":
            return _transposed_codes(name, weight, parts)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values [..., W * 32 / bits] of words [..., W] as int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    """Return scales; bytes are exponents of two with a bias of 127 (E8M0)."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def _cells(numbers: torch.Tensor, grid: Grid) -> Cells:
    return Cells(numbers, grid.rows, grid.columns)


def _packed_codes(name: str, weight: QuantisedWeight, parts: Parts) -> Codes:
    """Return the codes of compressed-tensors' words, which are too large by half their range."""
    num_rows, num_columns = weight.shape
    bits = weight.group.bits
    cells = weight.grid.shape(num_rows, num_columns)
    values = parts["values"].contiguous().view(torch.uint8)
    num_bytes = -(-num_columns * bits // 8)
    zero, half = parts.get("zero_point"), 1 << (bits - 1)
    if zero is not None and zero.dtype == torch.int32:  # words along the rows
        zero = unpack(zero.T.contiguous(), bits).T[: cells[0]].to(torch.uint8)
    elif zero is not None:
        zero = (zero.to(torch.int16) + half).to(torch.uint8)
    scale = parts["scale"].reshape(cells)
    return _ordered(
        Codes(
            name,
            bits,
            num_rows,
            num_columns,
            values[:, :num_bytes],
            (_cells(scale, weight.grid),),
            zero=half if zero is None else _cells(zero.contiguous(), weight.grid),
        ),
        parts,
    )


def _transposed_codes(name: str, weight: QuantisedWeight, parts: Parts) -> Codes:
    """Return the codes of GPTQ and AWQ, whose files have inputs first, some outputs at a time."""
    bits, is_awq = weight.group.bits, weight.group.layout == "awq"
    num_rows, num_columns = weight.shape
    per_word = 32 // bits
    zero_GO = unpack(parts["zero_point"], bits)
    if is_awq:
        zero_GO = _awq_sorted(zero_GO)
    # AutoGPTQ, which writes format 1, keeps the sum to the same number of bits.
    zero_GO = (zero_GO + weight.group.zero_offset) & ((1 << bits) - 1)
    zero_OG = zero_GO.T[:num_rows].to(torch.uint8).contiguous()
    values = parts["values"]
    lower = torch.empty(num_rows, num_columns * bits // 8, dtype=torch.uint8, device=values.device)
    at_once = _MOST_ELEMENTS if values.device.type == "cpu" else _MOST_ON_A_GPU
    step = max(1, at_once // num_columns // per_word) * per_word
    for first in range(0, num_rows, step):
        end = min(num_rows, first + step)
        if is_awq:
            words_IW = values[:, first // per_word : -(-end // per_word)]
            codes_IO = _awq_sorted(unpack(words_IW, bits))[:, : end - first].to(torch.uint8)
            lower[first:end] = packed(codes_IO.T, bits)
        else:  # a word has inputs beside each other
            words_OW = values[:, first:end].T.clone(memory_format=torch.contiguous_format)
            lower[first:end] = words_OW.view(torch.uint8)
    scale = _cells(parts["scale"].T.contiguous(), weight.grid)
    zero = _cells(zero_OG, weight.grid)
    return _ordered(Codes(name, bits, num_rows, num_columns, lower, (scale,), zero=zero), parts)


def _ordered(codes: Codes, parts: Parts) -> Codes:
    """Return codes whose groups follow each other, if each input states its group."""
    if "order" not in parts:
        return codes
    group_I = parts["order"].long()
    (scale,) = codes.scale
    order = group_I.argsort(stable=True)
    in_order = group_I[order]
    size = scale.columns or codes.num_inputs
    expected = torch.arange(codes.num_inputs, device=group_I.device) // size
    if torch.equal(in_order, expected):
        lower = torch.empty_like(codes.lower)
        for first, end in codes.pieces(_MOST_ELEMENTS):
            found = unpacked(codes.lower[first:end], codes.bits)[:, : codes.num_inputs]
            lower[first:end] = packed(found[:, order], codes.bits)
        return replace(codes, lower=lower, order=order)
    # Groups of other sizes: a number for each input.
    zero = codes.zero
    if isinstance(zero, Cells):
        zero = Cells(zero.numbers[:, group_I], 1, 1)
    return replace(codes, scale=(Cells(scale.numbers[:, group_I], 1, 1),), zero=zero)


def _awq_sorted(values: torch.Tensor) -> torch.Tensor:
    words = values.reshape(*values.shape[:-1], -1, len(_AWQ_ORDER))
    inverse = [_AWQ_ORDER.index(each) for each in range(len(_AWQ_ORDER))]
    return words[..., inverse].flatten(-2)


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
    return dequantise(weight, parts_of(files, weight), dtype)


def parts_of(files: Mapping[Path, Any], weight: QuantisedWeight) -> Parts:
    """Return the tensors of a weight from open files, by role."""
    roles = weight.parts.items()
    return {role: files[part.path].get_tensor(part.name) for role, part in roles}


def planned_parts(weight: QuantisedWeight) -> Parts:
    """Return tensors without memory, but for the groups of inputs, which decide a load."""
    roles = ("values", "scale", "zero_point")
    return {
        role: torch.empty(part.shape, dtype=_DTYPES[part.kind], device="meta")
        for role, part in weight.parts.items()
        if role in roles
    }
