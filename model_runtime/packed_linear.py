"""Linear layers and activations on a CPU whose rows do not depend on the batch, to the bit.

torch's own do: a plain linear picks another kernel for one row than for several, and an
activation uses other code for the last few numbers of a tensor than for the rest. Either flips
near-ties between tokens, and then a request's text depends on its neighbours.

Measured (torch 2.13, oneDNN 3.12, AVX-512 with AMX and with AVX512_BF16 alone, 1 to 16 threads,
widths 64 to 11,008, 1 to 1,024 rows; tests/model_runtime/test_packed_linear.py repeats a part):
- Packed for several rows: every count of rows from two up gives the same bits, in bf16 up to 32.
  One row alone does not where the input is wider than 1,024, so there a single row is computed
  twice.
- Up to 16 rows are left to `row_products.py` where a trial shows that it gives the same bits.
- bf16: products of more than 32 rows give the same bits without AMX; with it they are blocked
  differently from size to size. So sizes above 32 are tried when the model is packed.
- oneDNN keeps code for every count of rows it has seen, 2 MiB and more for those of a chunk, and
  takes half a millisecond to make it. So a product is made of blocks of a few sizes, with rows of
  zeros in the last one.
- Packed products are also 2 to 3 times faster than plain ones, whatever the dtype.
- silu and tanh-gelu differ in the last bit near the end of each thread's part, unless the part is
  a multiple of the vector width. Padded blocks too small for two threads have no such end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from model_runtime.bfloat16 import as_numpy, as_tensor
from model_runtime.joined_linear import join, joined_weight, stand_in
from model_runtime.module_swap import swap_modules
from model_runtime.row_products import MOST_ROWS, PackedWeight, RowProducts, find_chain

# Any number above one chooses the layout that is good for several rows. But for float32 oneDNN 3.10
# (torch 2.11) lays nothing out below 128, some widths not below 1,024, and then has other products
# for few rows than for many.
_PACKED_FOR_ROWS = {torch.float32: 4096, torch.bfloat16: 8}
_VECTOR = 64  # a multiple of every vector width in use, in numbers
_UNSPLIT = 16_384  # numbers; torch gives a thread at least this many of any activation
_DTYPES = (torch.float32, torch.bfloat16)
_WIDEST_SINGLE_ROW = 1024  # inputs of a product whose one row may go alone
_SMALL_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)  # rows of a block
_LARGE_SIZES = (64, 128, 256, 512)  # where they give the same bits
# bf16 hides what sums differ in: another order of them shows in about one number of 10,000.
_TRIAL_NUMBERS = 1 << 18

Shape = tuple[int, int, bool, int]  # of a weight, whether it has a bias, and the threads


@dataclass(frozen=True, slots=True)
class Tried:
    """What products with a weight of some shape were found to do."""

    sizes: tuple[int, ...]  # rows of blocks that give the same bits, ascending
    chain: int | None  # inputs of a chain of oneDNN's sums (row_products.py); None: not found


_OPS: Any = torch.ops.mkldnn  # private to torch: only this file and row_products.py touch it


def is_available() -> bool:
    """Whether this build of torch has the packed products."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(_OPS, "_reorder_linear_weight")


@cache
def _blocks(num_rows: int, sizes: tuple[int, ...], *, are_few_apart: bool) -> tuple[int, ...]:
    """Sizes of blocks that `num_rows` rows are computed in; `sizes` ascend.

    The last block may be larger than its rows, unless up to MOST_ROWS are computed otherwise.
    """
    blocks = []
    while num_rows >= _SMALL_SIZES[-1]:
        blocks.append(max(size for size in sizes if size <= num_rows))
        num_rows -= blocks[-1]
    while num_rows:
        if are_few_apart:
            blocks.append(min(num_rows, MOST_ROWS))
        else:
            blocks.append(min(size for size in sizes if size >= num_rows))
        num_rows = max(0, num_rows - blocks[-1])
    return tuple(blocks)


class PackedProduct:
    """The weight of one or several linears with one input, laid out once for the processor."""

    def __init__(self, linears: Sequence[nn.Linear], tried: dict[Shape, Tried]) -> None:
        """`tried`: by shape, added to."""
        weight, self._bias = joined_weight(linears)
        self.out_features, self.in_features = weight.shape
        self._packed = _OPS._reorder_linear_weight(weight, _PACKED_FOR_ROWS[weight.dtype])
        self._product = _OPS._linear_pointwise.default
        self._num_threads = torch.get_num_threads()
        self._small = _SMALL_SIZES[1 if self.in_features > _WIDEST_SINGLE_ROW else 0 :]
        packed = PackedWeight(self._packed, self.out_features, self.in_features, self._bias)
        has_bias = self._bias is not None
        shape = (self.out_features, self.in_features, has_bias, self._num_threads)
        if shape not in tried:
            tried[shape] = self._try(packed)
        self._is_float32 = weight.dtype == torch.float32
        self._sizes = tried[shape].sizes
        chain = tried[shape].chain
        self._few = None if chain is None else RowProducts(packed, chain)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], each row as if it were alone."""
        num_rows = x.numel() // self.in_features
        few, sizes = self._few, self._sizes
        if not self._holds():
            few, sizes = None, self._small + (_LARGE_SIZES if self._is_float32 else ())
        if few is not None and 0 < num_rows <= MOST_ROWS:
            return few(x.contiguous())
        if num_rows in sizes:
            return self._multiply(x.contiguous())
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        blocks = _blocks(num_rows, sizes, are_few_apart=few is not None)
        rows = x.reshape(-1, self.in_features)
        if few is None:
            rows = nn.functional.pad(rows, (0, 0, 0, sum(blocks) - num_rows))
        products = [
            self._multiply(block) if few is None or len(block) > MOST_ROWS else few(block)
            for block in torch.split(rows.contiguous(), list(blocks))
        ]
        out = products[0] if len(products) == 1 else torch.cat(products)
        return out[:num_rows].reshape(*x.shape[:-1], self.out_features)

    def multiply(self, x_RK: Any) -> Any:
        """[R, in] -> [R, out], numpy's arrays of float32 or of bf16's bits."""
        few = self.few(len(x_RK))
        if few is not None:
            return few.multiply(x_RK)
        return as_numpy(self(as_tensor(x_RK, self._packed.dtype)))

    def few(self, num_rows: int) -> RowProducts | None:
        """What multiplies so few rows; None: the call itself does, whatever the number."""
        return self._few if 0 < num_rows <= MOST_ROWS and self._holds() else None

    def _holds(self) -> bool:
        """Whether threads are as many as when it was tried: what was found holds for no others."""
        return torch.get_num_threads() == self._num_threads

    def _try(self, packed: PackedWeight) -> Tried:
        """The sizes of blocks, and the chain of sums, that give the bits of small blocks."""
        dtype = self._packed.dtype
        generator = torch.Generator().manual_seed(0)
        num_rows = max(_LARGE_SIZES[-1], -(-_TRIAL_NUMBERS // self.out_features))
        rows = torch.randn(num_rows, self.in_features, generator=generator).to(dtype)

        def small(count: int) -> Tensor:
            return torch.cat(
                [self._multiply(block) for block in torch.split(rows[:count], MOST_ROWS)]
            )

        large: Sequence[int] = _LARGE_SIZES
        if dtype != torch.float32:  # where all have always been alike
            expected = small(_LARGE_SIZES[-1])
            large = [
                size for size in large if torch.equal(self._multiply(rows[:size]), expected[:size])
            ]
        count = max(MOST_ROWS, -(-_TRIAL_NUMBERS // self.out_features))
        return Tried((*self._small, *large), find_chain(packed, rows[:count], small(count)))

    def _multiply(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return out


class PackedLinear(nn.Module):
    """A linear whose weight is laid out once for the processor; the original is let go."""

    def __init__(self, linear: nn.Linear, product: PackedProduct | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = product or PackedProduct([linear], {})
        self.weight = stand_in(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], each row as if it were alone."""
        return self.product(x)


class RowwiseActivation(nn.Module):
    """An activation in which no number is in a vector loop's remainder, on any number of threads.

    Where torch would leave one, the tensor is padded to whole vectors, and computed in blocks that
    torch never splits.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The activation, same shape."""
        num_numbers = x.numel()
        # Not for a slice of linears with one input: torch has another gelu where rows have gaps.
        x = x.contiguous()
        if _leaves_no_remainder(num_numbers, torch.get_num_threads()):
            return self._activation(x)  # type: ignore[no-any-return]
        flat = nn.functional.pad(x.reshape(-1), (0, -num_numbers % _VECTOR))
        blocks = torch.split(flat, _UNSPLIT)
        activated = torch.cat([self._activation(block) for block in blocks])
        return activated[:num_numbers].reshape(x.shape)


@lru_cache
def _leaves_no_remainder(num_numbers: int, num_threads: int) -> bool:
    """Whether equal parts for any number of threads are whole vectors."""
    most = min(num_threads, -(-num_numbers // _UNSPLIT))
    return all(-(-num_numbers // parts) % _VECTOR == 0 for parts in range(1, most + 1)) and (
        num_numbers % _VECTOR == 0
    )


def pack(model: nn.Module, groups: Sequence[Sequence[str]] = ()) -> None:
    """Replace every linear and stateless activation of the model, in place.

    `groups`: names of linears that read one tensor, in the order of their calls
    (takeover.shared_inputs finds them).
    """
    tried: dict[Shape, Tried] = {}
    packable = [
        names for names in groups if all(_is_packable(model.get_submodule(name)) for name in names)
    ]
    join(model, packable, lambda linears: PackedProduct(linears, tried))
    activations = _activation_classes()

    def other(module: nn.Module) -> nn.Module | None:
        if _is_packable(module):
            return PackedLinear(module, PackedProduct([module], tried))
        if isinstance(module, activations) and not list(module.parameters()):
            return RowwiseActivation(module)
        return None

    swap_modules(model, other)


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.dtype in _DTYPES


def _activation_classes() -> tuple[type[nn.Module], ...]:
    entries: list[Any] = list(ACT2CLS.values())
    return tuple(entry[0] if isinstance(entry, tuple) else entry for entry in entries)
