"""Linear layers and activations on a CPU with rows that do not depend on the batch, to the bit.

`packed_product.py` describes the layout and product of a weight. torch's silu and tanh-gelu differ
in the last bit near the end of each thread's part, unless the part is a multiple of the SIMD width.
Padded blocks that are too small for two threads have no such end.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor, nn

from model_runtime.layers.merged_linear import join, placeholder
from model_runtime.layers.packed_product import DTYPES, PackedProduct, Way, Workshop
from model_runtime.layers.replace_modules import activation_classes, swap_modules
from model_runtime.layers.way_trial import choose_way

_VECTOR = 64  # elements; a multiple of every SIMD width in use
_UNSPLIT = 16_384  # elements; torch gives a thread at least this many of any activation


class PackedLinear(nn.Module):
    """A linear with a weight that is laid out once for the processor; the original is freed."""

    def __init__(self, linear: nn.Linear, product: PackedProduct | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = product or PackedProduct([linear], workshop_for(linear.weight.dtype))
        self.weight = placeholder(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear, [..., in] -> [..., out]; rows do not depend on each other."""
        return self.product(x)


class RowwiseActivation(nn.Module):
    """An activation without elements in a SIMD loop's remainder, on any number of threads.

    If torch would leave a remainder, the tensor is padded to whole SIMD registers and computed in
    blocks that torch never splits.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation, same shape."""
        num_values = x.numel()
        # A merged linear's slice has gaps between rows, and torch has another gelu for those.
        x = x.contiguous()
        if _leaves_no_remainder(num_values, torch.get_num_threads()):
            return self._activation(x)  # type: ignore[no-any-return]
        flat = nn.functional.pad(x.reshape(-1), (0, -num_values % _VECTOR))
        blocks = torch.split(flat, _UNSPLIT)
        activated = torch.cat([self._activation(block) for block in blocks])
        return activated[:num_values].reshape(x.shape)


@lru_cache
def _leaves_no_remainder(num_values: int, num_threads: int) -> bool:
    """Return whether equal parts for any number of threads are whole SIMD registers."""
    max_parts = min(num_threads, -(-num_values // _UNSPLIT))
    return all(-(-num_values // parts) % _VECTOR == 0 for parts in range(1, max_parts + 1)) and (
        num_values % _VECTOR == 0
    )


def pack(model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> None:
    """Replace every linear and stateless activation of the model, in place.

    `groups`: names of linears that read one tensor, in the order of their calls
    (merged_linear.shared_inputs finds them).
    """
    workshops = {dtype: workshop_for(dtype) for dtype in _dtypes(model)}

    def product(linears: Sequence[nn.Linear]) -> PackedProduct:
        return PackedProduct(linears, workshops[linears[0].weight.dtype])

    packable = [
        names for names in groups if all(_is_packable(model.get_submodule(name)) for name in names)
    ]
    join(model, packable, product)
    activations = activation_classes()

    def other(module: nn.Module) -> nn.Module | None:
        if _is_packable(module):
            return PackedLinear(module, product([module]))
        if isinstance(module, activations) and not list(module.parameters()):
            return RowwiseActivation(module)
        return None

    swap_modules(model, other)


def workshop_for(dtype: torch.dtype) -> Workshop:
    """Return a workshop for weights of a dtype, with the way that suits this processor."""
    return Workshop(choose_way(dtype))


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {module.weight.dtype for module in model.modules() if _is_packable(module)}


def described(ways: Iterable[Way], dtype: torch.dtype) -> str:
    """Return the ways in which weights of a dtype are laid out, for the banner."""
    name = str(dtype).removeprefix("torch.")
    return " and ".join(way.value.format(name) for way in sorted(set(ways), key=list(Way).index))


def ways_of(model: nn.Module) -> set[Way]:
    """Return the ways of all products of a packed model."""
    products = (getattr(module, "product", None) for module in model.modules())
    return {product.way for product in products if isinstance(product, PackedProduct)}


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype in DTYPES
