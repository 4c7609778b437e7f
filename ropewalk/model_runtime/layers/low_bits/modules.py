"""Modules in the place of linears and embeddings whose weights are stored in few bits.

A module's weight *is* its widened weight. A model with these modules is therefore an ordinary model
with other numbers, and the self-check compares with it. The forward of a linear widens a part of
its weight at a time. It is slow, and `product.py` replaces it once the model is patched.

Nothing here imports numba before a forward runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels


def _without_memory(num_inputs: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a weight without rows: model code may read its dtype and its device."""
    return nn.Parameter(torch.empty(0, num_inputs, dtype=dtype), requires_grad=False)


class LowBitLinear(nn.Module):
    """A linear whose weight is stored in few bits."""

    is_linear: ClassVar = True  # see random_numbers.py

    def __init__(self, panels: "LowBitPanels", bias: Tensor | None, dtype: torch.dtype) -> None:
        """Keep the panels. `dtype` is the number type of inputs and outputs."""
        super().__init__()
        self.in_features, self.out_features = panels.num_inputs, panels.num_outputs
        self.panels = panels
        self.weight = _without_memory(panels.num_inputs, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear, [..., K] -> [..., N]."""
        from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # numba
            plain_product,
        )

        out = plain_product(self.panels, x)
        return out if self.bias is None else out + self.bias


class ReorderedLinear(nn.Module):
    """Linears of one tensor that make one linear, with other orders of inputs and outputs.

    Blocks of few bits lie along the inputs, so panels cannot have another order of these. Several
    linears may each have a format of its own.
    """

    _outputs_N: Tensor | None
    _inputs_K: Tensor | None

    def __init__(
        self,
        linears: Sequence[nn.Module],
        rows_N: NDArray[np.int64] | None,
        columns_K: NDArray[np.int64] | None,
    ) -> None:
        """Keep the linears, whose outputs are concatenated.

        `rows_N`: the output of the linears for each of the module's. `columns_K`: the same of the
        inputs. None: the same order.
        """
        super().__init__()
        self.part = nn.ModuleList(linears)
        orders = (
            ("_outputs_N", rows_N),
            ("_inputs_K", None if columns_K is None else columns_K.argsort()),
        )
        for name, order in orders:
            found = None if order is None else torch.from_numpy(order)
            self.register_buffer(name, found, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear, [..., K] -> [..., N]."""
        if self._inputs_K is not None:
            x = x.index_select(-1, self._inputs_K)
        parts = [each(x) for each in self.part]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out if self._outputs_N is None else out.index_select(-1, self._outputs_N)


def in_float_panels(linear: nn.Linear) -> LowBitLinear:
    """Return a linear of floats with its weight in float32 panels, for a product with others.

    The number of its inputs is a multiple of 32.
    """
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # imports numba
        PanelWriter,
        float_parts,
    )

    writer = PanelWriter(FLOAT32, *linear.weight.shape)
    writer.write(0, float_parts(linear.weight.detach()))
    return LowBitLinear(writer.panels, linear.bias, linear.weight.dtype)


class LowBitEmbedding(nn.Module):
    """An embedding whose rows are stored in few bits, perhaps in a head's panels.

    A row is multiplied by the embedding's own scale, if it has one (Gemma).
    """

    def __init__(self, panels: "LowBitPanels", original: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = panels.num_outputs, panels.num_inputs
        self.padding_idx = original.padding_idx
        self.panels = panels
        self.weight = _without_memory(panels.num_inputs, original.weight.dtype)
        scale: Any = getattr(original, "embed_scale", None)
        self.embed_scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the rows of token ids, [...] -> [..., K]."""
        from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (  # noqa: PLC0415  # numba
            gathered,
        )

        rows = gathered(self.panels, input_ids.reshape(-1).numpy(), self.weight.dtype)
        rows = rows.view(*input_ids.shape, self.embedding_dim)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)
