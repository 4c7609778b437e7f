"""A weight laid out for this processor, and its products: each row has the same bits in any batch.

torch's own linear uses one kernel for one row and another for several. That flips near-ties between
tokens, so a request's text depends on the other requests in its batch. Here a weight is laid out in
one of three ways. `way_trial.py` finds which of them work on this processor with this build of
torch, and which is fastest.

- `ONEDNN`: packed by oneDNN in the model's dtype. Up to 16 rows are multiplied over the same memory
  by `skinny_gemm.py`, at the speed of memory.
- `STORED`: bfloat16 in panels of our own. For up to 16 rows, the weight is widened in registers.
  For more rows, a block of the weight is widened into scratch memory and multiplied by oneDNN's
  float32 product. Widening is exact and the sums are in the same order, so skinny products have the
  bits of others. This way is for processors that multiply bfloat16 slowly or not at all.
- `OWN`: panels of our own, and every row is multiplied by `skinny_gemm.py`. It needs no oneDNN.

These results were measured with torch 2.13 and oneDNN 3.12 on AVX2, on AVX-512 with AMX and with
AVX512_BF16 alone. They cover 1 to 16 threads, widths 64 to 11,008 and 1 to 1,024 rows. A part is
repeated in tests/model_runtime/layers/test_packed_linear.py:
- If a weight is packed for several rows, all counts of rows from two up give the same bits, in bf16
  up to 32. With inputs wider than 1,024, and in bf16 with AVX-512 but without AVX512_BF16, one row
  alone gives other bits, so a single row is then computed twice. With AVX2, one row alone gives the
  same bits, too.
- In bf16, products of more than 32 rows give the same bits without AMX. With AMX, their blocking
  differs from size to size. So sizes above 32 are tried when the model is packed.
- oneDNN keeps code for every count of rows it has seen. It takes 2 MiB and more for the counts of a
  chunk, and half a millisecond to make. So a product is made of blocks of a few sizes, with rows of
  zeros in the last one.
- Packed products are also 2 to 3 times faster than plain ones, for every dtype.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import block_outputs
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (
    FLOAT32,
    IN_PAIRS,
    MOST_ROWS,
    PANEL,
    WIDENED,
    Multiplying,
    Panels,
    RowProducts,
    own_panels,
)
from ropewalk.model_runtime.layers.block_product import StoredProduct, scratch_panels
from ropewalk.model_runtime.layers.joined_linears import merged_weight
from ropewalk.model_runtime.layers.onednn import OneDnnWeight

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels

DTYPES = (torch.float32, torch.bfloat16)
_WIDEST_SINGLE_ROW = 1024  # max inputs of a product that may compute one row alone
SMALL_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)  # rows of a block
LARGE_SIZES = (64, 128, 256, 512)  # used if they give the same bits
# bf16 hides most differences of sums. Another order shows in about one value of 10,000, and in
# most values of float32.
_TRIAL_VALUES = {torch.float32: 1 << 14, torch.bfloat16: 1 << 18}
_CHAINS = (512, 1024, 2048, 4096)  # inputs of a chain, tried after one chain of all inputs
_RANDOM_BYTES = 128 << 20  # the most that random numbers in the place of a weight take
_SCRATCH_BYTES = 1 << 20  # of widened weights, which should stay in a core's level-2 cache


class Way(enum.Enum):
    """The layout of a weight; values are the banner's text."""

    ONEDNN = "oneDNN packed {}"
    STORED = "stored {}, multiplied in float32"
    OWN = "own panels of {}"


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of the trial of one weight shape."""

    sizes: tuple[int, ...]  # block sizes in rows that give the same bits, ascending
    chain: int | None  # inputs of one chain of the library's sums; None: not found


class Workshop:
    """The way, the trials by shape and the scratch memory of one model's products."""

    def __init__(self, way: Way) -> None:
        """Begin without trials."""
        self.way = way
        self._tried: dict[tuple[int | bool | torch.dtype, ...], Tried] = {}
        self._scratch: dict[tuple[int, int], OneDnnWeight] = {}

    def tried(self, product: "PackedProduct", shape: tuple[int | bool | torch.dtype, ...]) -> Tried:
        """Return the trial's result for this shape; the first product of a shape runs it.

        Weights decide nothing: zeros, and multiples of a power of two, have the same sums in any
        order. So the trial runs with random numbers. If these have fewer outputs, or are floats in
        the place of few bits, then the product must confirm what they show.
        """
        if shape not in self._tried:
            random = product.random_shape()
            found = random_trial(*random, torch.get_num_threads())
            if product.way is not Way.ONEDNN or random[0] < product.out_features:
                own = product.trial([found.chain] if found.chain else [])
                found = Tried(tuple(size for size in own.sizes if size in found.sizes), own.chain)
            self._tried[shape] = found
        return self._tried[shape]

    def block_outputs(self, num_outputs: int, num_inputs: int) -> int:
        return block_outputs(num_outputs, num_inputs, _SCRATCH_BYTES)

    def scratch(self, num_outputs: int, num_inputs: int) -> OneDnnWeight:
        """Return float32 scratch memory for equal blocks of a weight of this shape."""
        shape = self.block_outputs(num_outputs, num_inputs), num_inputs
        if shape not in self._scratch:
            self._scratch[shape] = OneDnnWeight(torch.zeros(shape))
        return self._scratch[shape]


class _Untried(Workshop):
    """A workshop whose products are not tried when they are laid out."""

    def tried(self, product: "PackedProduct", shape: tuple[int | bool | torch.dtype, ...]) -> Tried:
        del product, shape
        return Tried((), None)


@cache
def _blocks(num_rows: int, sizes: tuple[int, ...], *, has_skinny: bool) -> tuple[int, ...]:
    """Return the sizes of the blocks in which `num_rows` rows are computed; `sizes` ascend.

    The last block may be larger than its rows, unless `has_skinny`: then up to MOST_ROWS rows are
    computed by another kernel.
    """
    blocks = []
    while num_rows >= SMALL_SIZES[-1]:
        blocks.append(max(size for size in sizes if size <= num_rows))
        num_rows -= blocks[-1]
    while num_rows:
        if has_skinny:
            blocks.append(min(num_rows, MOST_ROWS))
        else:
            blocks.append(min(size for size in sizes if size >= num_rows))
        num_rows = max(0, num_rows - blocks[-1])
    return tuple(blocks)


class PackedProduct:
    """The weight of one or several linears with one input, laid out once for the processor."""

    weights: Sequence["LowBitPanels"] = ()  # if they are of few bits
    is_rounding = False  # whether rows are rounded to eight bits
    _panels: Panels | None
    _many: Callable[[Tensor], Tensor] | None

    def __init__(self, linears: Sequence[nn.Linear], workshop: Workshop) -> None:
        """Lay out the weight. Raises RuntimeError if the workshop's way is not possible here."""
        weight_NK, bias_N = merged_weight(linears)
        num_outputs, num_inputs = weight_NK.shape
        self._begin(num_outputs, num_inputs, weight_NK.dtype, workshop)
        if self.way is Way.ONEDNN:
            packed = OneDnnWeight(weight_NK)
            self._panels = packed.panels(bias_N)
            self._many = lambda x_RK: packed.multiply(x_RK, bias_N)
        elif self.way is Way.STORED:
            scratch = workshop.scratch(num_outputs, num_inputs)
            num_packed = scratch_panels(scratch).layout
            panels = own_panels(weight_NK, bias_N, num_packed)
            self._panels = panels
            self._many = StoredProduct(panels, bias_N, scratch).multiply
        else:
            self._panels = own_panels(weight_NK, bias_N)
        self._try(workshop, has_bias=bias_N is not None)

    def random_shape(self) -> tuple[int, int, bool, torch.dtype]:
        """Return a shape in which random numbers have the sums of this product, for its trial.

        A weight that is widened block by block is multiplied as one block of float32.
        """
        num_outputs, dtype = self.out_features, self._dtype
        if self.way is Way.STORED:
            num_outputs = self._block_outputs
            dtype = torch.float32
        most = _RANDOM_BYTES // (dtype.itemsize * self.in_features) // PANEL * PANEL
        return min(num_outputs, max(PANEL, most)), self.in_features, self._has_bias, dtype

    def _begin(
        self, num_outputs: int, num_inputs: int, dtype: torch.dtype, workshop: Workshop
    ) -> None:
        """Set what does not depend on the layout."""
        self.out_features, self.in_features = num_outputs, num_inputs
        self._dtype = dtype
        self.way = workshop.way
        self._num_threads = torch.get_num_threads()
        is_alike = num_inputs <= _WIDEST_SINGLE_ROW and dtype == torch.float32
        self._small = SMALL_SIZES[0 if is_alike else 1 :]
        self._panels = self._many = None

    def _try(self, workshop: Workshop, *, has_bias: bool) -> None:
        """Find the sizes of blocks and the chain of sums, now that the weight is laid out."""
        self._has_bias = has_bias
        self._block_outputs = workshop.block_outputs(self.out_features, self.in_features)
        self._sizes: tuple[int, ...] = ()
        chain: int | None = self.in_features
        if self._many is not None:
            shape = (self.out_features, self.in_features, has_bias, self._dtype, self._num_threads)
            tried = workshop.tried(self, shape)
            self._sizes, chain = tried.sizes, tried.chain
            if chain is None and self.way is Way.STORED:
                self.way, self._many, chain = Way.OWN, None, self.in_features
        self._skinny = None if chain is None else self._row_products(chain)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product, [..., in] -> [..., out]; rows do not depend on each other."""
        num_rows = x.numel() // self.in_features
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self._many is None:
            assert self._skinny is not None
            return self._skinny(x.contiguous())
        skinny, sizes = self._skinny, self._sizes
        if not self._holds():
            skinny, sizes = None, self._sizes_of_other_threads()
        if skinny is not None and num_rows <= MOST_ROWS:
            return skinny(x.contiguous())
        rows = x.reshape(-1, self.in_features)
        if num_rows in sizes:
            out = self._multiply(rows.contiguous())
            return out.view(*x.shape[:-1], self.out_features)
        blocks = _blocks(num_rows, sizes, has_skinny=skinny is not None)
        if skinny is None:
            rows = nn.functional.pad(rows, (0, 0, 0, sum(blocks) - num_rows))
        products = [
            self._multiply(block) if skinny is None or len(block) > MOST_ROWS else skinny(block)
            for block in torch.split(rows.contiguous(), list(blocks))
        ]
        out = products[0] if len(products) == 1 else torch.cat(products)
        return out[:num_rows].reshape(*x.shape[:-1], self.out_features)

    def multiply(self, x_RK: Any) -> Any:
        """Compute the product, [R, in] -> [R, out]; numpy arrays of float32 or of bf16's bits."""
        skinny = self._skinny if self._many is None else self.skinny(len(x_RK))
        if skinny is not None:
            return skinny.multiply(x_RK)
        return as_numpy(self(as_tensor(x_RK, self._dtype)))

    def skinny(self, num_rows: int) -> RowProducts | None:
        """Return the kernel for few rows; None if `num_rows` must go through the call itself."""
        return self._skinny if 0 < num_rows <= MOST_ROWS and self._holds() else None

    def round_rows(self, products_of: Callable[[Panels], RowProducts]) -> None:
        """Multiply any number of rows by a kernel that rounds them, from now on."""
        assert self._panels is not None
        self.is_rounding, self.way, self._many = True, Way.OWN, None
        self._skinny = products_of(self._panels)

    def trial(self, chains: Sequence[int] | None = None) -> Tried:
        """Find the sizes of blocks, and the chain of sums, that give the bits of small blocks.

        `chains`: those that are tried; None: all that are known.

        The library may raise RuntimeError, and then this way is not possible here. So the trials of
        modules (equivalence.py) do not fit: they take an error as another kind of module.
        """
        generator = torch.Generator().manual_seed(0)
        min_rows = -(-_TRIAL_VALUES[self._dtype] // self.out_features)
        # A last block of a single row would have other bits than the rows of larger blocks.
        count = max(1, -(-min_rows // MOST_ROWS)) * MOST_ROWS
        num_rows = count + (0 if self._is_float32_product() else LARGE_SIZES[-1])
        rows = torch.randn(num_rows, self.in_features, generator=generator).to(self._dtype)

        def by(size: int, count: int) -> Tensor:
            blocks = torch.split(rows[:count], size)
            return torch.cat([self._multiply(block) for block in blocks])

        large: Sequence[int] = LARGE_SIZES
        if not self._is_float32_product():
            counts = {size: -(-min_rows // size) * size for size in large}
            expected = by(MOST_ROWS, max(counts.values()))
            large = [
                size
                for size in large
                if torch.equal(by(size, counts[size]), expected[: counts[size]])
            ]
        if chains is None:
            chains = list(dict.fromkeys((self.in_features, *_CHAINS)))
        chain = self._find_chain(chains, rows[:count], by(MOST_ROWS, count))
        return Tried((*self._small, *large), chain)

    def _find_chain(self, chains: Sequence[int], x_RK: Tensor, expected_RN: Tensor) -> int | None:
        """Find how many inputs make a chain of the library's sums; None if no length matches."""
        if self._panels is None or not self._panels.takes(self._multiplying()):
            return None
        for chain in chains:
            products = self._row_products(chain)
            found = torch.cat([products(rows) for rows in torch.split(x_RK, MOST_ROWS)])
            if torch.equal(found, expected_RN):
                return chain
        return None

    def _row_products(self, chain: int) -> RowProducts:
        assert self._panels is not None
        return RowProducts(self._panels, chain, self._multiplying())

    def _multiplying(self) -> Multiplying:
        if self._dtype == torch.float32:
            return FLOAT32
        return IN_PAIRS if self.way is Way.ONEDNN else WIDENED

    def _holds(self) -> bool:
        """Return whether the number of threads is the trial's; its results hold for no other."""
        return self._many is None or torch.get_num_threads() == self._num_threads

    def _sizes_of_other_threads(self) -> tuple[int, ...]:
        return self._small + (LARGE_SIZES if self._is_float32_product() else ())

    def _is_float32_product(self) -> bool:
        """Return whether the library multiplies float32, where all block sizes are alike."""
        return self._dtype == torch.float32 or self.way is Way.STORED

    def _multiply(self, x_RK: Tensor) -> Tensor:
        assert self._many is not None
        return self._many(x_RK)


@cache
def random_trial(
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,  # noqa: FBT001  # a part of a shape
    dtype: torch.dtype,
    num_threads: int,
) -> Tried:
    """Try oneDNN's product of random numbers, once in a process for a shape.

    `num_threads` is torch's number, which decides the order of sums, too.
    """
    del num_threads
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(num_inputs, num_outputs, bias=has_bias, device="meta", dtype=dtype)
    for name, parameter in list(linear.named_parameters()):
        numbers = torch.randn(parameter.shape, generator=generator).to(dtype)
        setattr(linear, name, nn.Parameter(numbers, requires_grad=False))
    return PackedProduct([linear], _Untried(Way.ONEDNN)).trial()
