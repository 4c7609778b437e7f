"""The scheme of a quantised checkpoint: which numbers it stores, and how far a scale reaches.

No torch: `config check` reads schemes, too.
"""

import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

PATTERN = "re:"  # before a target that is a regular expression
Layout = Literal["fp8", "int8", "packed", "gptq", "awq", "mxfp4"]


@dataclass(frozen=True, slots=True)
class Grid:
    """The rectangle of a weight that one scale is for; 0 means all rows or all columns."""

    rows: int
    columns: int

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight."""
        return (
            math.ceil(num_rows / self.rows) if self.rows else 1,
            math.ceil(num_columns / self.columns) if self.columns else 1,
        )

    def __str__(self) -> str:
        if self.rows > 1:
            return f"in blocks of {self.rows} x {self.columns}"
        if self.columns:
            return f"in groups of {self.columns}"
        return "with a scale per row" if self.rows else "with a scale per tensor"


PER_TENSOR = Grid(0, 0)
PER_ROW = Grid(1, 0)


@dataclass(frozen=True, slots=True)
class Group:
    """How the weights of some modules are stored."""

    layout: Layout
    bits: int
    grids: tuple[Grid, ...]  # more than one: the shape of the scales decides
    has_zero_points: bool = False
    zero_offset: int = 0  # added to a stored zero point
    targets: tuple[str, ...] = ("Linear",)  # classes, module names, or `re:` patterns

    def names_module(self, module: str) -> bool:
        """Return whether a target is a module's name or a pattern that it matches."""
        for target in self.targets:
            pattern = target.removeprefix(PATTERN)
            if target == module or (pattern != target and re.match(pattern, module)):
                return True
        return False

    def __str__(self) -> str:
        if self.layout == "mxfp4":
            return "mxfp4"
        number = "fp8" if self.layout == "fp8" else f"int{self.bits}"
        return f"{number} {self.grids[0]}" if len(self.grids) == 1 else number


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are stored."""

    method: str  # `quant_method` of the config
    groups: tuple[Group, ...]
    has_activations: bool = False  # it means activations or the cache to be quantised, too

    def group_of(self, module: str) -> Group | None:
        """Return the group of a module's weight: named targets come before classes."""
        for group in self.groups:
            if group.names_module(module):
                return group
        return next((each for each in self.groups if "Linear" in each.targets), None)

    def __str__(self) -> str:
        parts = " and ".join(dict.fromkeys(map(str, self.groups)))
        return parts if parts.startswith(self.method) else f"{self.method} ({parts})"


@dataclass(frozen=True, slots=True)
class Format:
    """A line of the page of models: what is read, or which package reads it."""

    method: str
    packing: str
    package: str = ""  # that reads it; empty if we do


FORMATS: Sequence[Format] = (
    Format("awq", "`version` gemm, `bits` 4, with zero points"),
    Format("compressed-tensors", "pack-quantized, 4 or 8 bits"),
    Format("compressed-tensors", "int-quantized, 8 bits"),
    Format("compressed-tensors", "float-quantized, 8 bits (E4M3)"),
    Format("compressed-tensors", "naive-quantized, 8 bits"),
    Format("fp8", "E4M3 in blocks or with a scale per tensor"),
    Format("gptq", "`checkpoint_format` gptq or gptq_v2, `bits` 2, 4 or 8"),
    Format("mxfp4", "experts of gpt-oss"),
    Format("compressed-tensors", "nvfp4, mxfp4, mxfp8, sparse", "compressed-tensors"),
    Format("aqlm", "any", "aqlm"),
    Format("auto-round", "any", "auto-round"),
    Format("bitnet", "any", "accelerate"),
    Format("bitsandbytes", "any", "bitsandbytes"),
    Format("eetq", "any", "eetq"),
    Format("fbgemm_fp8", "any", "fbgemm-gpu"),
    Format("fouroversix", "any", "fouroversix"),
    Format("fp_quant", "any", "fp_quant"),
    Format("gemma", "any", "accelerate"),
    Format("higgs", "any", "flute-kernel"),
    Format("hqq", "any", "hqq"),
    Format("metal", "any", "kernels"),
    Format("modelopt", "any, NVFP4 too", "nvidia-modelopt"),
    Format("mxfp8", "any", "accelerate"),
    Format("nvfp4", "any", "kernels"),
    Format("quanto", "any", "optimum-quanto"),
    Format("quark", "any", "amd-quark"),
    Format("sinq", "any", "sinq"),
    Format("spqr", "any", "spqr_quant"),
    Format("torchao", "any", "torchao"),
    Format("vptq", "any", "vptq"),
)


# Scales of activations and of the cache, which are served in the number type of the weights.
OF_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point"),
)
# Ends of names that say that a tensor belongs to a quantised weight.
_PARTS = (
    *(".scales", ".qscale_weight", ".g_idx", ".qzeros", ".absmax"),
    *("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_zero_point"),
    *("weight_packed", "weight_shape", "weight_g_idx"),
)
# The same behind the name of a weight. Models have parameters with such names, too: Gemma 4's
# `router.per_expert_scale` is no scale of a `router.per_expert`.
_PARTS_OF_NAMES = (
    *("_scale", "_scale_inv", "_scales", "_global_scale", "_zero_point", "_packed", "_blocks"),
    *("_shape", "_g_idx"),
)
# The same, certain enough to refuse a checkpoint whose config says nothing.
UNSTATED = (".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed", ".weight.absmax")


def is_part(name: str, names: Container[str]) -> bool:
    """Return whether a tensor's name says that it belongs to a quantised weight."""
    if name.endswith((*_PARTS, *OF_ACTIVATIONS)):
        return True
    ends = [end for end in _PARTS_OF_NAMES if name.endswith(end)]
    return any(name.removesuffix(end) in names for end in ends)
