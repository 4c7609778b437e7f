"""The names and sizes of ggml's number types, and tensor names, from the package `gguf`.

The only file that imports the package. It needs numpy and no torch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    MODEL_TENSORS,
    GGMLQuantizationType,
    get_tensor_name_map,
)
from gguf.quants import dequantize

# Every type that the package dequantises; a test compares.
READ_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)

_OF_STATES = ("SSM_", "SHORTCONV_", "TIME_MIX_")  # tensors of layers that keep states


def type_name(number: int) -> str | None:
    """Return the name of a type's number in a file; None if the package does not know it."""
    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return None


def block_of(name: str) -> tuple[int, int]:
    """Return a type's block: its number of values, and its size in bytes."""
    num_values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return num_values, num_bytes


def dequantised(rows: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    kind = GGMLQuantizationType[name]
    return dequantize(np.ascontiguousarray(rows), kind)


def file_name_of(architecture: str, num_layers: int) -> Callable[[str], str | None]:
    """Return the function from a module's name in transformers to the name in a file."""
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(number, num_layers).get_name


def keeps_states(architecture: str) -> bool:
    """Return whether the package knows an architecture with layers that keep states."""
    tensors = {name: MODEL_TENSORS.get(key, []) for key, name in MODEL_ARCH_NAMES.items()}
    return any(each.name.startswith(_OF_STATES) for each in tensors.get(architecture, ()))
