"""Divided linears on a CPU, as other replacements of modules expect a packed linear.

Shapes: R = rows, K = inputs, N = outputs.
"""

from typing import Any

from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.layers.packed_linear import PackedLinear, ways_of
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way
from ropewalk.model_runtime.layers.replace_modules import swap_modules
from ropewalk.model_runtime.parallel.cut import GatheredLinear


class GatheredProduct(PackedProduct):
    """The product of one rank's outputs between its gathers, in the place of a whole product."""

    def __init__(self, linear: GatheredLinear) -> None:
        """Surround the product of a linear that is packed already."""
        own: PackedProduct = linear.linear.product
        self.way = own.way
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._own, self._gathered = own, linear.gathered
        self._dtype = linear.linear.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product of the gathered inputs, gathered: [..., K] -> [..., N]."""
        return self._gathered(self._own, x)

    def skinny(self, num_rows: int) -> None:
        """Return None: every number of rows goes through the gathers."""

    def multiply(self, x_RK: Any) -> Any:
        """Compute the product, [R, K] -> [R, N]; numpy arrays of float32 or of bf16's bits."""
        return as_numpy(self(as_tensor(x_RK, self._dtype)))


def use_packed_gathers(model: nn.Module) -> None:
    """Replace each divided linear, once it is packed, by a packed linear that gathers, in place."""

    def other(module: nn.Module) -> PackedLinear | None:
        if not isinstance(module, GatheredLinear) or not isinstance(module.linear, PackedLinear):
            return None
        linear = module.linear
        product = GatheredProduct(module)
        linear.in_features, linear.out_features = product.in_features, product.out_features
        linear.product = product
        return linear

    swap_modules(model, other)


def ways_number(model: nn.Module) -> int:
    """Return the ways of all products of a packed model as bits of a number."""
    ways = ways_of(model)
    return sum(1 << place for place, way in enumerate(Way) if way in ways)
