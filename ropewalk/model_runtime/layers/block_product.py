"""bfloat16 panels that are widened block by block to float32, for oneDNN's product of many rows.

Shapes: R = rows, K = inputs, N = outputs, Q = numbers in memory.
"""

import torch
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.elementwise import as_tensor
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL, Panels, widen_panels
from ropewalk.model_runtime.layers.onednn import OneDnnWeight

# Our own copy takes 0.6 of the time of torch's on one thread; torch's is shared out to more.
_THREADS_OF_OWN_COPY = 2


class StoredProduct:
    """bfloat16 panels that are widened block by block for oneDNN's float32 product."""

    def __init__(self, panels: Panels, bias_N: Tensor | None, scratch: OneDnnWeight) -> None:
        """Take scratch memory. Raises RuntimeError if its order is not known."""
        self._scratch = scratch
        self._scratch_panels = scratch_panels(scratch)
        self._panels = panels
        self._bias_N = None if bias_N is None else bias_N.float()

    def multiply(self, x_RK: Tensor) -> Tensor:
        """Multiply rows, [R, K] -> [R, N]."""
        num_outputs, rows_RK = self._panels.num_outputs, x_RK.float()
        num_panels, block = self._panels.num_panels, self._scratch_panels.num_panels
        out_RN = None
        for first in range(0, num_panels, block):
            self._widen(first, min(first + block, num_panels))
            columns = slice(first * PANEL, min((first + block) * PANEL, num_outputs))
            part_RN = self._scratch.multiply(rows_RK, None)
            part_RN = part_RN[:, : columns.stop - columns.start]
            if self._bias_N is not None:
                part_RN += self._bias_N[columns]
            if part_RN.shape[1] == num_outputs:  # the only block
                return part_RN.to(x_RK.dtype).contiguous()
            if out_RN is None:
                out_RN = x_RK.new_empty(len(x_RK), num_outputs)
            out_RN[:, columns] = part_RN
        assert out_RN is not None
        return out_RN

    def _widen(self, first: int, end: int) -> None:
        """Widen panels `first` to `end` - 1 into the scratch memory."""
        size = self._panels.layout * PANEL
        numbers_Q = self._panels.packed_Q[first * size : end * size]
        scratch_Q = self._scratch_panels.packed_Q[: len(numbers_Q)]
        if torch.get_num_threads() <= _THREADS_OF_OWN_COPY:
            widen_panels(self._panels.packed_Q, first * size, scratch_Q)
        else:
            torch.from_numpy(scratch_Q).copy_(as_tensor(numbers_Q, torch.bfloat16))


def scratch_panels(scratch: OneDnnWeight) -> Panels:
    """Return the memory of a scratch weight. Raises RuntimeError if its order is not known."""
    panels = scratch.panels(None)
    if panels is None:
        raise RuntimeError("oneDNN packs float32 weights in an order that is not known")
    return panels
