"""The experts of a layer, laid out for a CPU; each row has the same bits in any batch.

transformers' products of an expert have as many rows as chose it, and the library's kernel depends
on that number. Here every product is one chain of sums over all inputs, whatever the rows are. The
sums between the products are float32, and a row's experts are added in ascending order. So a
bfloat16 result is rounded once.

The gates of nearly all models are one compiled pass (`cpu_kernels/experts/gates.py`). Another gate
is the layer's own code, called on float32 in whole SIMD registers.

Shapes: R = rows, C = choices of a row, S = pairs of row and expert, K = inputs, N = outputs, W =
outputs with padding to whole panels.
"""

from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.activations import GELU_ERF, GELU_TANH, SILU
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.experts.gates import CLAMPED, Gate, gated_experts
from ropewalk.model_runtime.cpu_kernels.experts.products import (
    ExpertPanels,
    ExpertProduct,
    add_experts,
    grouped,
)
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL
from ropewalk.model_runtime.layers.replace_modules import Replacement
from ropewalk.model_runtime.probing.equivalence import equal_by_row, trial_rows

_TRIAL_SCALES = (0.1, 1.0, 30.0)  # reveal other activations, and those that clip large values
_ROUNDING = {torch.float32: 1e-5}
_MOST_PAIRS = 4096  # at once, so that the sums between the products stay small
_UNSPLIT = 16_384  # elements; torch gives a thread at least this many of any activation


class PackedExperts(Replacement):
    """The experts of a layer; attributes that it has not are those of the model's own module."""

    def __init__(
        self, original: Any, gate_up: ExpertPanels, down: ExpertPanels, num_outputs: int
    ) -> None:
        super().__init__(original)
        self.num_experts, self.num_outputs = len(original.down_proj), num_outputs
        self.panels = gate_up, down
        self.num_between = -(-gate_up.num_panels // 2) * PANEL  # with padding
        self.gate = _gate_of(original) if original.has_gate else None  # None: the layer's own

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each row, [R, K], [R, C], [R, C] -> [R, N]."""
        x_RK = as_numpy(x.contiguous()).reshape(-1, x.shape[-1])
        choice_RC = as_numpy(top_k_index.long().contiguous())
        weights_RC = as_numpy(top_k_weights.float().contiguous())
        out_RN = self.multiply(x_RK, choice_RC, weights_RC)
        return as_tensor(out_RN, x.dtype).view(*x.shape[:-1], self.num_outputs)

    @property
    def is_low_bit(self) -> bool:
        """Return whether all weights have few bits."""
        return all(each.formats for each in self.panels)

    def use(self, product: ExpertProduct) -> None:
        """Multiply by another product of the same panels, from now on."""
        first, second = self.panels
        self.panels = first._replace(product=product), second._replace(product=product)

    def multiply(self, x_RK: Any, choice_RC: Any, weights_RC: Any) -> Any:
        """Compute the experts of each row; numpy arrays of float32 or of bf16's bits."""
        out_RN = np.empty((len(x_RK), self.num_outputs), x_RK.dtype)
        step = max(1, _MOST_PAIRS // choice_RC.shape[1])
        for first in range(0, len(x_RK), step):
            rows = slice(first, first + step)
            self._write(x_RK[rows], choice_RC[rows], weights_RC[rows], out_RN[rows])
        return out_RN

    def _write(self, x_RK: Any, choice_RC: Any, weights_RC: Any, out_RN: Any) -> None:
        """Write the outputs of some rows."""
        gate_up, down = self.panels
        pairs = grouped(choice_RC, weights_RC, self.num_experts)
        between_SW = self._between(gate_up.multiply(x_RK, pairs.row_of_S, pairs))
        y_SW = down.multiply(between_SW, np.arange(len(between_SW)), pairs)
        add_experts(y_SW, pairs, out_RN)

    def _between(self, both_SW: Any) -> Any:
        """Return the inputs of the second product, with padding."""
        if self.gate is not None:
            return gated_experts(both_SW, self.gate)
        own: Any = self._original[0]
        function = own._apply_gate if own.has_gate else own.act_fn  # noqa: SLF001
        both = nn.functional.pad(torch.from_numpy(both_SW), (0, -both_SW.shape[1] % (2 * PANEL)))
        # A block is whole registers, because a row is, and torch does not split it among threads.
        blocks = torch.split(both, max(1, _UNSPLIT // both.shape[1]))
        return torch.cat([function(block) for block in blocks]).numpy()


@torch.inference_mode()
def _gate_of(module: Any) -> Gate | None:
    """Return the compiled gate that computes what the module's does; None if there is none."""
    both = trial_rows(2 * PANEL, _TRIAL_SCALES)
    is_mixed = not module.is_concatenated
    try:
        expected: Tensor = module._apply_gate(both)  # noqa: SLF001
        clamped = _clamped_gate(module, is_mixed=is_mixed)
    except Exception:  # noqa: BLE001  # code of a checkpoint raises any type
        return None
    known = [Gate(kind, is_mixed) for kind in (SILU, GELU_TANH, GELU_ERF)]
    for gate in [*known, *([clamped] if clamped else [])]:
        found = torch.from_numpy(gated_experts(both.numpy(), gate))
        if found.shape == expected.shape and equal_by_row(_ROUNDING)(found, expected):
            return gate
    return None


def _clamped_gate(module: Any, *, is_mixed: bool) -> Gate | None:
    """Return the clamped gate with the numbers that two values of the module's gate follow from.

    A gate of 1 and an up of 0 give sigmoid(alpha). With a huge up, they give limit + 1 times that.
    """
    gates, ups = torch.ones(2, PANEL).double(), torch.tensor([0.0, 1e9]).double()
    parts = (gates, ups[:, None].expand(2, PANEL))
    both = torch.stack(parts, -1).flatten(1) if is_mixed else torch.cat(parts, -1)
    small, large = module._apply_gate(both)[:, 0].tolist()  # noqa: SLF001
    if not 0 < small < 1:
        return None
    return Gate(CLAMPED, is_mixed, alpha=log(small / (1 - small)), limit=large / small - 1)
