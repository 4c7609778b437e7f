"""Which weights are stored in few bits, and how many bytes they take; neither torch nor numba."""

import re
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import (
    BY_TYPE,
    FLOAT32,
    INT8,
    PANEL,
    ROUNDED,
    Format,
    panels_text,
)
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.quantised_scheme import Scheme
from ropewalk.model_runtime.layers.experts.router_names import is_router

Weights = Literal["stored", "int8", "dequantised"]
Activations = Literal["auto", "exact", "int8", "fp8"]
_FEWEST_OUTPUTS = PANEL  # fewer would pad a panel, and such linears are often routers
# Linears that read one tensor are one product. Names are those of transformers and of GGUF.
_QUERY_KEY_VALUE = re.compile(r"\b[qkv]_proj\b|\battn_[qkv]\b")
_GATE_UP = re.compile(r"\b(gate|up)_proj\b|\bffn_(gate|up)(_shexp)?\b|\bfeed_forward\.w[13]\b")
_DELTA = re.compile(  # Gated DeltaNet; a joined linear has parts 0 and 1
    r"\bin_proj_(qkvz|ba|qkv|z|b|a)(\.part\.\d)?\b|\battn_(qkv|gate)\b|\bssm_(alpha|beta|ba|in)\b"
)


def format_of_type(type_name: str | None) -> Format | None:
    """Return the format that holds a type of GGUF in its own bits, or None."""
    return BY_TYPE.get(type_name or "")


def can_hold(name: str, shape: tuple[int, ...], kind: Format) -> bool:
    """Return whether a weight of a linear or an embedding can be stored in a format.

    `name` is the parameter's in transformers, with `.weight`.
    """
    module, _, parameter = name.rpartition(".")
    return (
        parameter == "weight"
        and len(shape) == 2
        and shape[1] % kind.block == 0
        and not is_router(module)
        and ".experts." not in name
    )


def can_quantise(name: str, shape: tuple[int, ...]) -> bool:
    return can_hold(name, shape, INT8) and shape[0] >= _FEWEST_OUTPUTS


def can_quantise_experts(num_inputs: int, num_between: int) -> bool:
    """Return whether the experts of a layer are quantised to int8, by the widths of a row."""
    widths = num_inputs, num_between
    return all(each % INT8.block == 0 and each >= _FEWEST_OUTPUTS for each in widths)


def is_kept(scheme: Scheme | None) -> bool:
    """Return whether the experts of a checkpoint with this scheme stay in their bits on a CPU."""
    return scheme is not None and scheme.method == "mxfp4"


@dataclass
class Storage:
    """The bytes of a model's weights, once they are stored."""

    by_format: dict[str, int] = field(default_factory=dict)  # panels or codes, with scales
    float_bytes: int = 0
    expert_bytes: int = 0  # of experts in few bits, a part of `by_format`
    in_codes: bool = False  # on a GPU; a load chooses the products
    is_rounding: bool = False  # whether products with weights of few bits round their rows
    low_products: set[tuple[str, int]] = field(default_factory=set)  # of few bits, with inputs
    # Bytes that floats take in addition if they join a product of few bits, by product and inputs.
    widening: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, int], kind: Format, *, is_product: bool) -> None:
        """Count a weight; `is_product` is false for an embedding whose weight is no head's."""
        num_bytes = kind.num_bytes(shape[0], shape[1])
        self.by_format[kind.name] = self.by_format.get(kind.name, 0) + num_bytes
        if is_product:
            self.low_products.add((_product(name), shape[1]))

    def add_experts(self, shape: tuple[int, ...], kind: Format) -> None:
        """Count a matrix of experts, [E, N, K] or [N, K] of one."""
        num_bytes = prod(shape[:-2]) * kind.num_bytes(shape[-2], shape[-1])
        self.by_format[kind.name] = self.by_format.get(kind.name, 0) + num_bytes
        self.expert_bytes += num_bytes

    def add_widening(self, name: str, shape: tuple[int, ...], itemsize: int) -> None:
        """Count what a linear that stays float may take in addition; see `widening`."""
        if len(shape) == 2 and _product(name) != name:
            key = _product(name), shape[1]
            widening = FLOAT32.num_bytes(*shape) - prod(shape) * itemsize
            self.widening[key] = self.widening.get(key, 0) + widening

    @property
    def num_bytes(self) -> int:
        widening = sum(size for key, size in self.widening.items() if key in self.low_products)
        floats = self.float_bytes + widening
        return sum(self.by_format.values()) + floats

    @property
    def formats(self) -> str:
        """Return the names of the formats, most bytes first."""
        return " and ".join(sorted(self.by_format, key=lambda name: -self.by_format[name]))

    def products(self, numbers: str) -> str:
        """Return how weights in few bits are multiplied, for the banner; see `panels_text`."""
        if self.in_codes:
            return f"{self.formats}; a load chooses their products"
        return panels_text(self.formats, ROUNDED if self.is_rounding else numbers)


def _product(name: str) -> str:
    """Return the name of the product that a linear is a part of."""
    name = _GATE_UP.sub("gate_up", _QUERY_KEY_VALUE.sub("qkv", name))
    return _DELTA.sub("in_proj", name)


def refuse_int8(device_type: str, *, is_divided: bool) -> None:
    """Raise ModelError if the kernels of int8 do not serve this device or several processes."""
    if device_type != "cpu":
        raise ModelError(f"weights: int8 is served on a CPU only, the device is {device_type}")
    if is_divided:
        raise ModelError(
            "weights: int8 is not divided among processes; tensor_parallel_size must be 1"
        )


DIVIDED_STORED = (
    "weights: stored is not divided among GPUs; set weights to dequantised, or "
    "tensor_parallel_size to 1"
)
NEEDS_FEW_BITS = (
    "activations: int8 needs linears or experts with quantised weights; set weights to int8, or "
    "serve a GGUF file that has them"
)
NEEDS_FP8 = (
    "activations: fp8 needs linears with weights in FP8 that have one scale for a row or a tensor, "
    "or for 128 x 128 on a GPU of compute capability 9.0, and weights: stored"
)


def refuse_rounding(device_type: str, activations: Activations, *, is_divided: bool) -> None:
    """Raise ModelError if activations are not rounded on this device or by several processes."""
    if activations == "int8" and device_type != "cpu":
        raise ModelError(f"activations: int8 is served on a CPU only, the device is {device_type}")
    if activations == "fp8" and device_type != "cuda":
        raise ModelError(f"activations: fp8 is served on a GPU only, the device is {device_type}")
    if is_divided:
        raise ModelError(
            f"activations: {activations} is not divided among processes; tensor_parallel_size must "
            "be 1"
        )
