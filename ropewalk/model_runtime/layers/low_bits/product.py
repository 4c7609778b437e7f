"""The products of linears with weights of few bits: the bits of a plain product, in any batch.

Every number of rows is multiplied over the panels (`cpu_kernels/low_bits`). If oneDNN multiplies
float32 here, then a trial of each shape finds the order of its sums, and these products have it
too. So they have the bits of the same weights held as floats.
"""

from collections.abc import Sequence

import torch

from ropewalk.model_runtime.cpu_kernels.low_bits.aligned import aligned, are_aligned
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32, block_outputs
from ropewalk.model_runtime.cpu_kernels.low_bits.products import LowBits
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import RowProducts
from ropewalk.model_runtime.layers.joined_linears import merged_bias
from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear
from ropewalk.model_runtime.layers.packed_product import (
    PackedProduct,
    Way,
    Workshop,
    random_trial,
)
from ropewalk.model_runtime.layers.way_trial import choose_way

_TRIAL_BYTES = 8 << 20  # of the random weight that shows the order of oneDNN's sums


class LowBitWorkshop(Workshop):
    """The kernels of a model's formats, besides the trials."""

    def __init__(
        self, linears: Sequence[LowBitLinear], groups: Sequence[Sequence[LowBitLinear]] = ()
    ) -> None:
        """Find the kernels for all formats of the model.

        `groups`: linears that will be one product.
        """
        super().__init__(Way.OWN)
        self.has_onednn = choose_way(torch.float32) is Way.ONEDNN
        formats = {each.panels.kind for each in linears}
        if any(map(_crosses_formats, groups)):
            formats.add(FLOAT32)
        self.kernels = LowBits(formats, linears[0].weight.dtype)

    def product(self, linears: Sequence[LowBitLinear]) -> "LowBitProduct":
        return LowBitProduct(linears, self)

    def chain(self, num_outputs: int, num_inputs: int, *, has_bias: bool) -> int:
        """Return the inputs of a chain of oneDNN's sums for this shape; all, if it has no such."""
        if not self.has_onednn:
            return num_inputs
        num_outputs = block_outputs(num_outputs, num_inputs, _TRIAL_BYTES)
        shape = num_outputs, num_inputs, has_bias, torch.float32
        return random_trial(*shape, torch.get_num_threads()).chain or num_inputs


def _crosses_formats(linears: Sequence[LowBitLinear]) -> bool:
    """Return whether a panel of the joined product has outputs of several formats."""
    several = len({each.panels.kind for each in linears}) > 1
    return several and not are_aligned([each.out_features for each in linears])


class LowBitProduct(PackedProduct):
    """The product of one or several linears with one input, whose weights have few bits."""

    def __init__(self, linears: Sequence[LowBitLinear], workshop: LowBitWorkshop) -> None:
        """Join the linears' panels. Nothing is copied if all but the last are full."""
        num_outputs = sum(each.out_features for each in linears)
        self._kernels = workshop.kernels
        self._begin(num_outputs, linears[0].in_features, self._kernels.dtype, workshop)
        bias_N = merged_bias(linears)
        self.weights = aligned([each.panels for each in linears])
        self._panels = self._kernels.panels(self.weights, bias_N)
        chain = workshop.chain(num_outputs, self.in_features, has_bias=bias_N is not None)
        self._skinny = self._row_products(chain)

    def _row_products(self, chain: int) -> RowProducts:
        assert self._panels is not None
        return self._kernels.row_products(self._panels, chain)
