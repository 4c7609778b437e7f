"""oneDNN's packed products, through torch's private operators.

Only this file uses `torch.ops.mkldnn`. A build of torch may lack the operators, and a processor may
lack the instructions that oneDNN needs for a dtype. `OneDnnWeight` then raises RuntimeError.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL, Panels

_OPS: Any = torch.ops.mkldnn
# Any number above one selects the layout for several rows. For float32, however, oneDNN 3.10 (torch
# 2.11) packs no weight for a number below 128, and some widths not below 1,024. An unpacked weight
# has other products for few rows than for many.
_PACKED_FOR_ROWS = {torch.float32: 4096, torch.bfloat16: 8}


def is_available() -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(_OPS, "_reorder_linear_weight")


def shows_memory() -> bool:
    """Return whether this build of torch exposes the address of packed memory."""
    return hasattr(_OPS, "data_ptr") and hasattr(_OPS, "_nbytes")


class OneDnnWeight:
    """A weight packed by oneDNN, and the product of rows with it."""

    def __init__(self, weight_NK: Tensor) -> None:
        """Pack the weight. Raises RuntimeError if this processor or this build cannot."""
        self._shape = weight_NK.shape
        self.dtype = weight_NK.dtype
        self._packed = _OPS._reorder_linear_weight(weight_NK, _PACKED_FOR_ROWS[weight_NK.dtype])
        self._product = _OPS._linear_pointwise.default

    def multiply(self, x_RK: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply rows, [R, K] -> [R, N]; rows are contiguous and of the weight's dtype."""
        out: Tensor = self._product(x_RK, self._packed, bias_N, "none", [], "")
        return out

    def memory(self) -> Any:
        """Return the packed memory, not copied; float32 or bf16's bits. `self` keeps it alive."""
        kind = ctypes.c_float if self.dtype == torch.float32 else ctypes.c_uint16
        pointer = ctypes.cast(_OPS.data_ptr(self._packed), ctypes.POINTER(kind))
        return np.ctypeslib.as_array(pointer, (_OPS._nbytes(self._packed) // self.dtype.itemsize,))

    def panels(self, bias_N: Tensor | None) -> Panels | None:
        """Return the memory as panels; None if its size shows another layout.

        Only a product shows if the elements are in the order of panels.
        """
        if not shows_memory():
            return None
        num_outputs, num_inputs = self._shape
        values = self.memory()
        num_packed, rest = divmod(len(values), -(-num_outputs // PANEL) * PANEL)
        if rest or num_packed < num_inputs:
            return None
        return Panels(values, num_packed, num_outputs, num_inputs, bias_N, self)
