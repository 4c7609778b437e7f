"""The products of linears with weights of few bits: the bits of a plain product, in any batch.

Up to 16 rows are multiplied over the panels (`cpu_kernels/low_bits`). For more rows, a block of the
weight is widened into scratch memory and multiplied by oneDNN's float32 product, as `STORED`
weights are. A trial finds that both give the same bits. If it fails, all rows are multiplied over
the panels.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ropewalk.model_runtime.cpu_kernels.low_bits.aligned import aligned, are_aligned
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32, SCRATCH_BYTES
from ropewalk.model_runtime.cpu_kernels.low_bits.products import LowBits
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL, Multiplying
from ropewalk.model_runtime.cpu_kernels.threads import parallel_for
from ropewalk.model_runtime.layers.block_product import BlockProduct
from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear
from ropewalk.model_runtime.layers.merged_linear import merged_bias
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way, Workshop
from ropewalk.model_runtime.layers.way_trial import choose_way


class LowBitWorkshop(Workshop):
    """The kernels of a model's formats, besides the trials and the scratch memory."""

    def __init__(
        self, linears: Sequence[LowBitLinear], groups: Sequence[Sequence[LowBitLinear]] = ()
    ) -> None:
        """Find the kernels for all formats of the model.

        `groups`: linears that will be one product.
        """
        # oneDNN's product of scratch memory has known sums if its own float32 product has.
        is_known = choose_way(torch.float32) is Way.ONEDNN
        super().__init__(Way.STORED if is_known else Way.OWN, SCRATCH_BYTES)
        formats = {each.panels.kind for each in linears}
        if any(map(_crosses_formats, groups)):
            formats.add(FLOAT32)
        self.kernels = LowBits(formats, linears[0].weight.dtype)

    def product(self, linears: Sequence[LowBitLinear]) -> "LowBitProduct":
        return LowBitProduct(linears, self)


def _crosses_formats(linears: Sequence[LowBitLinear]) -> bool:
    """Return whether a panel of the joined product has outputs of several formats."""
    several = len({each.panels.kind for each in linears}) > 1
    return several and not are_aligned([each.out_features for each in linears])


class _Blocks(BlockProduct):
    """Panels of few bits, widened block by block for oneDNN's float32 product."""

    kernels: LowBits

    def widen(self, first: int, end: int) -> None:
        """Widen panels `first` to `end` - 1 into the scratch memory."""
        num_parts = min(end - first, torch.get_num_threads())
        edges = [first + (end - first) * part // num_parts for part in range(num_parts + 1)]
        size = self.scratch.layout * PANEL

        def work(part: int) -> None:
            at = (edges[part] - first) * size
            out_Q: Any = self.scratch.packed_Q[at:]
            self.kernels.widen(
                self.panels, edges[part], edges[part + 1], self.scratch.layout, out_Q
            )

        parallel_for(work, range(num_parts))


class LowBitProduct(PackedProduct):
    """The product of one or several linears with one input, whose weights have few bits."""

    def __init__(self, linears: Sequence[LowBitLinear], workshop: LowBitWorkshop) -> None:
        """Join the linears' panels. Nothing is copied if all but the last are full."""
        num_outputs = sum(each.out_features for each in linears)
        self._kernels = workshop.kernels
        self._begin(num_outputs, linears[0].in_features, self._kernels.dtype, workshop)
        bias_N = merged_bias(linears)
        self.weights = aligned([each.panels for each in linears])
        panels = self._kernels.panels(self.weights, bias_N)
        self._panels = panels
        if self.way is Way.STORED:
            blocks = _Blocks(panels, bias_N, workshop.scratch(num_outputs, self.in_features))
            blocks.kernels = self._kernels
            self._many = blocks.multiply
        self._try(workshop, has_bias=bias_N is not None)

    def _multiplying(self) -> Multiplying:
        return self._kernels.multiplying
