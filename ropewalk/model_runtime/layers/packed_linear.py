"""Linear layers and activations on a CPU with rows that do not depend on the batch, to the bit.

`packed_product.py` describes the layout and product of a weight. torch's silu and tanh-gelu differ
in the last bit near the end of each thread's part, unless the part is a multiple of the SIMD width.
Padded blocks that are too small for two threads have no such end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.activations import KINDS
from ropewalk.model_runtime.cpu_kernels.elementwise import activated, as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import ROUNDED, panels_text
from ropewalk.model_runtime.layers.joined_linears import is_linear, placeholder
from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear, in_float_panels
from ropewalk.model_runtime.layers.packed_product import DTYPES, PackedProduct, Way, Workshop
from ropewalk.model_runtime.layers.replace_modules import activation_classes, swap_modules
from ropewalk.model_runtime.layers.way_trial import choose_way
from ropewalk.model_runtime.probing.equivalence import equal_by_row, trial_rows
from ropewalk.model_runtime.tracing.operations import Linears

if TYPE_CHECKING:
    from ropewalk.model_runtime.layers.low_bits.product import LowBitWorkshop

_VECTOR = 64  # elements; a multiple of every SIMD width in use
_TRIAL_SCALES = (0.1, 1.0, 30.0)  # reveal other activations, and those that clip large values
_ACTIVATION_ROUNDING = 1e-5  # relative to the norm of a row
_NARROW = 512  # outputs; wider ones are of functions that replace_activations finds
_GAP = 16  # values between narrow rows; even, since pairs may be read as complex numbers
_UNSPLIT = 16_384  # elements; torch gives a thread at least this many of any activation


class PackedLinear(nn.Module):
    """A linear with a weight that is laid out once for the processor; the original is freed."""

    is_linear: ClassVar = True  # see random_numbers.py

    def __init__(
        self, linear: nn.Linear | LowBitLinear, product: PackedProduct | None = None, first: int = 0
    ) -> None:
        """Keep a product, in which the linear's outputs begin at `first`."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = product or Workshops([linear]).product([linear])
        self._first = first
        self.weight = placeholder(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear, [..., in] -> [..., out]; rows do not depend on each other.

        A product of several linears is computed whole, because a program calls it, not this.
        """
        out = self.product(x)
        if out.shape[-1] != self.out_features:
            return out.narrow(-1, self._first, self.out_features)
        if self.out_features % _VECTOR and self.out_features < _NARROW:
            # torch computes contiguous rows, such as those of gates of heads, as one. The end of a
            # SIMD loop then lies elsewhere in another batch, and a softplus has other bits there.
            out = nn.functional.pad(out, (0, _GAP))[..., :-_GAP]
        return out


class RowwiseActivation(nn.Module):
    """An activation whose values have the same bits wherever they stand, on any number of threads.

    `kind`: the compiled activation with its outputs; None: there is none, and torch computes it
    without elements in a SIMD loop's remainder.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation
        self.kind = kind_of(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation, same shape."""
        if self.kind is None or x.dtype not in DTYPES:
            return rowwise(self._activation, x)
        return as_tensor(activated(as_numpy(x.contiguous()).reshape(-1), self.kind), x.dtype).view(
            x.shape
        )


@torch.inference_mode()
def kind_of(activation: nn.Module) -> int | None:
    """Return the compiled activation that has the outputs of a module, or None."""
    trial = trial_rows(_VECTOR, _TRIAL_SCALES)
    try:
        expected = activation(trial)
    except Exception:  # noqa: BLE001  # code of a checkpoint raises any type
        return None
    is_equal = equal_by_row({torch.float32: _ACTIVATION_ROUNDING})
    for kind in KINDS:
        found = torch.from_numpy(activated(trial.flatten().numpy(), kind)).view_as(trial)
        if isinstance(expected, Tensor) and is_equal(found, expected):
            return kind
    return None


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a function of each element, without elements in a SIMD loop's remainder.

    If torch would leave a remainder, the tensor is padded to whole SIMD registers and computed in
    blocks that torch never splits.
    """
    num_values = x.numel()
    # A merged linear's slice has gaps between rows, and torch has another gelu for those.
    x = x.contiguous()
    if _leaves_no_remainder(num_values, torch.get_num_threads()):
        return function(x)
    flat = nn.functional.pad(x.reshape(-1), (0, -num_values % _VECTOR))
    blocks = torch.split(flat, _UNSPLIT)
    activated = torch.cat([function(block) for block in blocks])
    return activated[:num_values].reshape(x.shape)


@lru_cache
def _leaves_no_remainder(num_values: int, num_threads: int) -> bool:
    """Return whether equal parts for any number of threads are whole SIMD registers."""
    max_parts = min(num_threads, -(-num_values // _UNSPLIT))
    return all(-(-num_values // parts) % _VECTOR == 0 for parts in range(1, max_parts + 1)) and (
        num_values % _VECTOR == 0
    )


def replace_activations(model: nn.Module) -> None:
    """Replace every activation without parameters, in place."""
    kinds = activation_classes()

    def other(module: nn.Module) -> nn.Module | None:
        is_plain = isinstance(module, kinds) and not list(module.parameters())
        return RowwiseActivation(module) if is_plain else None

    swap_modules(model, other)


def pack(model: nn.Module, joined: Sequence[Linears] = ()) -> None:
    """Replace every linear of the model, in place, and lay out the products of `joined`."""
    for each in joined:
        each.modules = _held(model, each.modules)
    groups = [each.modules for each in joined if len(each.modules) > 1]
    workshops = Workshops([each for each in model.modules() if is_packable(each)], groups)
    packed: dict[int, PackedLinear] = {}
    for each in joined:
        known = packed.get(id(each.modules[0]))  # called several times
        each.product = workshops.product(each.modules) if known is None else known.product
        first = 0
        for linear in each.modules:
            if known is None:
                packed[id(linear)] = PackedLinear(linear, each.product, first)
                linear.weight = packed[id(linear)].weight  # the original is freed
            first += linear.out_features

    def other(module: nn.Module) -> nn.Module | None:
        known = packed.get(id(module))
        if known is not None or not is_packable(module):
            return known
        return PackedLinear(module, workshops.product([module]))

    swap_modules(model, other)


def _held(model: nn.Module, linears: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return linears of one product, with panels for floats beside few bits."""
    floats = {id(each) for each in linears if type(each) is nn.Linear}
    if not 0 < len(floats) < len(linears):
        return linears
    held = {id(each): in_float_panels(each) for each in linears if id(each) in floats}
    swap_modules(model, lambda module: held.get(id(module)))
    return tuple(held.get(id(each), each) for each in linears)


class Workshops:
    """The workshops of a model's linears: one for each number type, and one for few bits."""

    def __init__(
        self,
        linears: Sequence[nn.Linear | LowBitLinear],
        groups: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        """Choose the way that suits this processor, by number type.

        `groups`: linears that will be one product.
        """
        low = [each for each in linears if isinstance(each, LowBitLinear)]
        low_groups: list[list[Any]] = [
            list(each) for each in groups if all(isinstance(one, LowBitLinear) for one in each)
        ]
        self._low = _low_bit_workshop(low, low_groups) if low else None
        dtypes = {each.weight.dtype for each in linears if not isinstance(each, LowBitLinear)}
        self._by_dtype = {dtype: workshop_for(dtype) for dtype in dtypes}

    def product(self, linears: Sequence[Any]) -> PackedProduct:
        """Lay out the weights of linears of one kind."""
        if isinstance(linears[0], LowBitLinear):
            assert self._low is not None
            return self._low.product(linears)
        return PackedProduct(linears, self._by_dtype[linears[0].weight.dtype])


def _low_bit_workshop(
    linears: Sequence[LowBitLinear], groups: Sequence[Sequence[LowBitLinear]]
) -> "LowBitWorkshop":
    """Return a workshop for weights of few bits; models without them do not import its kernels."""
    from ropewalk.model_runtime.layers.low_bits.product import LowBitWorkshop  # noqa: PLC0415

    return LowBitWorkshop(linears, groups)


def workshop_for(dtype: torch.dtype) -> Workshop:
    """Return a workshop for weights of a dtype, with the way that suits this processor."""
    return Workshop(choose_way(dtype))


def described(ways: Iterable[Way], dtype: torch.dtype) -> str:
    """Return the ways in which weights of a dtype are laid out, for the banner."""
    name = str(dtype).removeprefix("torch.")
    return " and ".join(way.value.format(name) for way in sorted(set(ways), key=list(Way).index))


def products_text(model: nn.Module, dtype: torch.dtype) -> str:
    """Return how the weights of a packed model are laid out, for the banner."""
    sizes: Counter[str] = Counter()
    numbers = "float32"
    for product in products_of(model):
        sizes.update({each.kind.name: each.memory.nbytes for each in product.weights})
        rows = product.skinny(1)
        if product.weights and rows is not None and rows.multiplying.step > 1:
            numbers = "bfloat16"
        if product.is_rounding:
            numbers = ROUNDED
    formats = " and ".join(name for name, _ in sizes.most_common())
    texts = [panels_text(formats, numbers)] if formats else []
    ways = ways_of(model)
    return " and ".join(texts + ([described(ways, dtype)] if ways else []))


def products_of(model: nn.Module) -> list[PackedProduct]:
    """Return the products of a packed model, each once."""
    found = {}
    for module in model.modules():
        product = getattr(module, "product", None)
        if isinstance(product, PackedProduct):
            found[id(product)] = product
    return list(found.values())


def ways_of(model: nn.Module) -> set[Way]:
    """Return the ways of all products of a packed model, but for weights of few bits."""
    return {each.way for each in products_of(model) if not each.weights}


def is_packable(module: nn.Module) -> TypeGuard[nn.Linear | LowBitLinear]:
    return is_linear(module) and module.weight.dtype in DTYPES
