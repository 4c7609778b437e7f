"""The products of humming-kernels (the extra `gpu-weights`) for weights held as codes.

No GPU has run this. A trial of each linear and of each layer's experts decides whether it is used
(`executors.py`).

Shapes: S = rows, sorted by expert, E = experts, K = inputs, N = outputs, G = groups of inputs.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.formats.codes import Cells, Codes, packed
from ropewalk.model_runtime.formats.dequantise import FP4
from ropewalk.model_runtime.layers.low_bits.stored import Grouped, Multiply

NAME = "humming-kernels"
_BITS = (2, 4, 8)
_ALIGNED = 64  # inputs and outputs of a product


def is_there() -> bool:
    """Return whether the extra is installed."""
    return find_spec("humming") is not None


def could_serve(codes: Codes) -> bool:
    """Return whether the library has products for a format: integers with groups, FP8, MXFP4."""
    (scale, *others) = codes.scale
    if others or codes.upper is not None or codes.minimum:
        return False
    if codes.num_inputs % _ALIGNED or codes.num_outputs % _ALIGNED:
        return False
    if codes.table is not None:  # GGUF's MXFP4 has other codes
        return codes.table.tolist() == list(FP4) and scale.numbers.dtype == torch.float8_e8m0fnu
    if codes.lower.dtype == torch.float8_e4m3fn:
        return not isinstance(codes.zero, Cells) and codes.zero == 0
    middle = 1 << (codes.bits - 1)
    zero = 0 if codes.lower.dtype == torch.int8 else middle
    has_zeros = isinstance(codes.zero, Cells)
    is_unsigned = codes.lower.dtype == torch.uint8
    return (
        codes.bits in _BITS
        and scale.rows == 1
        and (is_unsigned if has_zeros else codes.zero == zero)
    )


def product(codes: Codes, dtype: torch.dtype) -> Multiply:
    """Return the library's product of a weight, in the library's layout."""
    layer, order = _layer(codes, dtype), codes.order

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if order is not None:
            rows = rows.index_select(-1, order)
        out: Tensor = layer(rows.contiguous())
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], -1)

    return multiply


def product_of_experts(codes: Codes, dtype: torch.dtype) -> Grouped:
    """Return the library's product of all experts. The inputs have one order."""
    layer = _layer(codes, dtype)
    compute = {"gemm_type": "grouped_contiguous"}

    def multiply(x_SK: Tensor, end_E: Tensor) -> Tensor:
        bounds = nn.functional.pad(end_E, (1, 0))
        out: Tensor = layer(x_SK.contiguous(), expert_layout=bounds, compute_config=compute)
        return out

    return multiply


def _layer(codes: Codes, dtype: torch.dtype) -> Any:
    from humming.layer import HummingLayer  # noqa: PLC0415  # the extra

    config, tensors = _stored(codes, dtype)
    with codes.lower.device:  # where it makes its tensors
        layer: Any = HummingLayer(
            shape_n=codes.num_outputs,
            shape_k=codes.num_inputs,
            weight_config=config,
            num_experts=len(codes.lower) if codes.lower.dim() > 2 else None,
            torch_dtype=dtype,
        )
    layer.load_state_dict(tensors, strict=False)
    layer.transform()
    return layer


def _stored(codes: Codes, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the library's words for a format, and the tensors in its form before `transform`."""
    scale = codes.scale[0]
    is_fp8 = codes.lower.dtype == torch.float8_e4m3fn
    config: dict[str, Any] = {"dtype": "float8e4m3" if is_fp8 else f"uint{codes.bits}"}
    lower, numbers = codes.lower, scale.numbers
    if lower.dtype == torch.int8:  # codes are too large by half their range
        lower = lower.view(torch.uint8) ^ 128
    tensors = {"weight": lower.contiguous().view(torch.int32)}
    if codes.table is not None:
        config |= {"dtype": "float4e2m1", "group_size": scale.columns}
        config["scale_dtype"] = "float8e8m0"
        tensors["weight_scale"] = numbers
    elif scale.rows > 1:
        config |= {"group_size": scale.columns, "group_size_n": scale.rows}
        tensors["weight_scale"] = numbers.float()
    elif scale.rows == 0:
        config["scale_type"] = "tensor"
        tensors["weight_scale"] = numbers.float().flatten()
    else:
        config["group_size"] = scale.columns
        tensors["weight_scale"] = numbers.to(dtype)
    if isinstance(codes.zero, Cells):
        config["has_zero_point"] = True
        tensors["zero_point"] = _zero_points(codes.zero.numbers, codes.bits)
    return config, tensors


def _zero_points(zero_NG: Tensor, bits: int) -> Tensor:
    """Return zero points as words along the outputs, [..., N * bits / 32, G]."""
    words_GW = packed(zero_NG.mT.contiguous(), bits).contiguous().view(torch.int32)
    return words_GW.mT.contiguous()
