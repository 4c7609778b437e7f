"""oneDNN's packed products, through the operators that torch keeps for itself.

Only this file names `torch.ops.mkldnn`. A build of torch may lack the operators, and a processor
may lack what oneDNN needs for a number type: `pack` raises RuntimeError then.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runtime.cpu_kernels.skinny_gemm import PANEL, Panels

_OPS: Any = torch.ops.mkldnn
# Any number above one chooses the layout that is good for several rows. But for float32 oneDNN 3.10
# (torch 2.11) lays nothing out below 128, some widths not below 1,024, and then has other products
# for few rows than for many.
_PACKED_FOR_ROWS = {torch.float32: 4096, torch.bfloat16: 8}


def is_available() -> bool:
    """Return whether this build of torch has the packed products."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(_OPS, "_reorder_linear_weight")


def shows_memory() -> bool:
    """Return whether this build of torch tells where packed memory is."""
    return hasattr(_OPS, "data_ptr") and hasattr(_OPS, "_nbytes")


class OneDnnWeight:
    """A weight as oneDNN has packed it, and the product of rows with it."""

    def __init__(self, weight_NK: Tensor) -> None:
        """Pack. Raises RuntimeError if oneDNN cannot, on this processor or in this build."""
        self._shape = weight_NK.shape
        self.dtype = weight_NK.dtype
        self._packed = _OPS._reorder_linear_weight(weight_NK, _PACKED_FOR_ROWS[weight_NK.dtype])
        self._product = _OPS._linear_pointwise.default

    def multiply(self, x_RK: Tensor, bias_N: Tensor | None) -> Tensor:
        """[R, K] -> [R, N]; rows are contiguous and of the weight's dtype."""
        out: Tensor = self._product(x_RK, self._packed, bias_N, "none", [], "")
        return out

    def memory(self) -> Any:
        """The packed numbers where they are, float32 or bf16's bits; `self` keeps them alive."""
        kind = ctypes.c_float if self.dtype == torch.float32 else ctypes.c_uint16
        pointer = ctypes.cast(_OPS.data_ptr(self._packed), ctypes.POINTER(kind))
        return np.ctypeslib.as_array(pointer, (_OPS._nbytes(self._packed) // self.dtype.itemsize,))

    def panels(self, bias_N: Tensor | None) -> Panels | None:
        """The memory as panels; None if its size shows that it is something else.

        Whether the numbers are where panels would have them, only a product shows.
        """
        if not shows_memory():
            return None
        num_outputs, num_inputs = self._shape
        numbers = self.memory()
        num_packed, rest = divmod(len(numbers), -(-num_outputs // PANEL) * PANEL)
        if rest or num_packed < num_inputs:
            return None
        return Panels(numbers, num_packed, num_outputs, num_inputs, bias_N, self)
