"""Rows over a weight in panels, compiled: few rows at the speed of memory, many at the core's.

A panel is 64 outputs with the inputs in order, as oneDNN packs weights on x86-64. A decode step
multiplies one row, or a few, by every weight of the model. oneDNN takes about twice as long for
that as reading the weight takes. So few rows are multiplied here, over oneDNN's memory or over
panels of our own.

The sums are in the order of oneDNN's, so a row's bits do not depend on which of the two computed
it. An output is one chain of sums over all inputs, or the sum of one chain per K-block. oneDNN does
not document the length of a K-block; `packed_product.py` finds it by trial.

A bfloat16 weight is multiplied in pairs (`bf16_dot.py`), or each value is widened to float32 in a
register. Widening is exact, and only half the bytes of float32 are read.

Shapes: R = rows, K = inputs, N = outputs, Q = elements of packed memory.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.attention.bf16_dot import (
    HAS_PAIR_PRODUCTS,
    add_pair_products,
)
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Ints, Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor, narrow, widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.register_sums import (
    add_products,
    load_sums,
    no_sums,
    store_sums,
)
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, load, prefetch, store
from ropewalk.model_runtime.cpu_kernels.target import vectors
from ropewalk.model_runtime.cpu_kernels.threads import num_threads_for, run_on_threads, take_next

MOST_ROWS = 16  # of a product that oneDNN would compute more slowly
BLOCK_ROWS = 256  # in one pass over a panel, so that their sums stay in the level-2 cache
PANEL = 64  # outputs with adjacent weights
CHUNK = 64  # inputs of a panel that stay in the level-1 cache while all rows use them
_LINE_BYTES = 64
_AHEAD_BYTES = 32 << 10
# With less memory to read and fewer multiply-adds, one more thread costs more time than it saves.
_BYTES_PER_THREAD, _WORK_PER_THREAD = 1 << 18, 1 << 21
# Parts that a product has for each thread. Threads take them one by one, because a core may have
# other work, too.
_PARTS_PER_THREAD = 4
_FEWEST_ROWS = 16  # of a part; with fewer, widening weights takes longer than multiplying does
# Rows of a tile and registers per row. Sums take at most half of 32 registers or three quarters of
# 16, so that the factors and numbers fit beside them. A panel is whole tiles.
_TILES = (
    ((4, 4), (2, 4), (1, 4))
    if WIDTH == 16
    else ((4, 4), (2, 8), (1, 16))
    if vectors().num_registers >= 32
    else ((6, 2), (4, 2), (2, 4), (1, 8))
)


def _adder(num_rows: int, columns: int, add: Any, step: int, ahead_bytes: int) -> Any:
    """Compiled: `num_rows` rows times a chunk of a panel; `add` takes `step` inputs at once."""
    width = columns * WIDTH

    @jit(inline=True)
    def add_chunk(
        x_RK: Numbers, top: int, row: int, chunk: int, stop: int, begin: int,
        packed_Q: Numbers, base: int, sums: Floats,
    ) -> None:  # fmt: skip
        num_inputs = x_RK.shape[1]
        line, ahead = _LINE_BYTES // packed_Q.itemsize, ahead_bytes // packed_Q.itemsize
        for column in range(0, PANEL, width):
            tile = load_sums(sums, row * PANEL + column, PANEL, num_rows, columns)
            if chunk == begin:
                tile = no_sums(num_rows, columns)
            for k in range(chunk, stop, step):
                first = base + k * PANEL + column * step
                # The first pass over a chunk prefetches later chunks; later passes need no
                # prefetch.
                if ahead_bytes and column == 0 and row == 0:
                    for at in range(first, first + PANEL * step, line):
                        prefetch(packed_Q, at + ahead)
                factor = (top + row) * num_inputs + k
                tile = add(tile, x_RK, factor, num_inputs, packed_Q, first, columns)
            store_sums(sums, row * PANEL + column, PANEL, tile, columns)

    return add_chunk


def rows_adder(add: Any, step: int, ahead_bytes: int = _AHEAD_BYTES) -> Any:
    """Compiled: any number of rows times a chunk of a panel.

    `ahead_bytes`: the distance to the memory that is prefetched; 0 if the chunk is in a cache.
    """
    adders = {
        num_rows: _adder(num_rows, columns, add, step, ahead_bytes) for num_rows, columns in _TILES
    }
    most, add_most = next(iter(adders.items()))
    add_4, add_2, add_1 = (adders[num_rows] for num_rows in (4, 2, 1))

    @jit(inline=True)
    def add_rows(
        x_RK: Numbers, top: int, num_rows: int, chunk: int, stop: int, begin: int,
        packed_Q: Numbers, base: int, sums: Floats,
    ) -> None:  # fmt: skip
        row = 0
        while row < num_rows:
            left = num_rows - row
            arguments = (x_RK, top, row, chunk, stop, begin, packed_Q, base, sums)
            if left >= most:
                add_most(*arguments)
                row += most
            elif left >= 4:
                add_4(*arguments)
                row += 4
            elif left >= 2:
                add_2(*arguments)
                row += 2
            else:
                add_1(*arguments)
                row += 1

    return add_rows


@jit()
def block_rows(num_rows: int) -> int:
    """Return the rows of one pass; passes over as many rows take as long as each other."""
    num_blocks = max(1, (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
    return max(1, (num_rows + num_blocks - 1) // num_blocks)


@jit(inline=True)
def add_chain(sums: Floats, num_rows: int, totals: Floats, begin: int) -> None:
    """Add the sums of a chain to the totals; the chain at input 0 is the first."""
    for r in range(num_rows):
        for n in range(PANEL):
            totals[r, n] = sums[r, n] if begin == 0 else totals[r, n] + sums[r, n]


@jit(inline=True)
def write_totals(
    totals: Floats, num_rows: int, bias_N: Numbers, bias: Floats, out_RN: Numbers, top: int, at: int
) -> None:
    """Add the bias of a panel, if there is one, and write the outputs from `at` on."""
    width = min(PANEL, out_RN.shape[1] - at)
    if bias_N.shape[0]:
        widen(bias_N[at : at + width], bias)
        for r in range(num_rows):
            for n in range(width):
                totals[r, n] += bias[n]
    for r in range(num_rows):
        narrow(totals[r, :width], out_RN[top + r, at : at + width])


def _multiplier(add: Any, step: int) -> Any:
    """Compiled: rows times panels."""
    add_rows = rows_adder(add, step)

    @jit(apart=True)
    def multiply(
        x_RK: Numbers, packed_Q: Numbers, bias_N: Numbers, out_RN: Numbers, num_packed: int,
        chain: int, first_panel: int, end_panel: int,
    ) -> None:  # fmt: skip
        """Write the outputs of panels `first_panel` to `end_panel` - 1.

        Each panel has `num_packed` inputs.
        """
        num_inputs = x_RK.shape[1]
        most = block_rows(x_RK.shape[0])
        sums = np.empty((most, PANEL), np.float32)
        totals = np.empty((most, PANEL), np.float32)
        bias = np.empty(PANEL, np.float32)
        for top in range(0, x_RK.shape[0], most):
            num_rows = min(most, x_RK.shape[0] - top)
            for panel in range(first_panel, end_panel):
                base = panel * PANEL * num_packed
                for begin in range(0, num_inputs, chain):
                    end = min(num_inputs, begin + chain)
                    for chunk in range(begin, end, CHUNK):
                        stop = min(end, chunk + CHUNK)
                        add_rows(x_RK, top, num_rows, chunk, stop, begin, packed_Q, base, sums)
                    add_chain(sums, num_rows, totals, begin)
                write_totals(totals, num_rows, bias_N, bias, out_RN, top, panel * PANEL)

    return multiply


@jit()
def as_they_are(x_RK: Numbers) -> Numbers:
    return x_RK


@jit()
def widened(x_RK: Numbers) -> Floats:
    """Return a copy in float32."""
    wide_RK = np.empty(x_RK.shape, np.float32)
    for r in range(x_RK.shape[0]):
        widen(x_RK[r], wide_RK[r])
    return wide_RK


@jit()
def rows_between(x_RK: Numbers, top: int, stop: int) -> Numbers:
    """Return rows `top` to `stop` - 1."""
    return x_RK[top:stop]


@jit()
def widen_panels(packed_Q: Numbers, first: int, out_Q: Numbers) -> None:
    """Copy bfloat16 values from `first` on into a float32 array of whole panels."""
    ahead = _AHEAD_BYTES // packed_Q.itemsize
    for at in range(0, out_Q.shape[0], PANEL):
        prefetch(packed_Q, first + at + ahead)
        for column in range(at, at + PANEL, WIDTH):
            store(out_Q, column, load(packed_Q, first + column))


class Multiplying(NamedTuple):
    """One way to multiply rows by panels; its functions are compiled."""

    dtype: torch.dtype  # of rows, stored weight and output
    step: int  # inputs that one product takes
    rows_for: Any  # converts [R, K] of the dtype's values or bits to the input of `multiply`
    multiply: Any
    between: Any = rows_between  # a range of the rows that `multiply` takes


_multiply_numbers = _multiplier(add_products, 1)
FLOAT32 = Multiplying(torch.float32, 1, as_they_are, _multiply_numbers)
WIDENED = Multiplying(torch.bfloat16, 1, widened, _multiply_numbers)
IN_PAIRS = Multiplying(torch.bfloat16, 2, as_they_are, _multiplier(add_pair_products, 2))


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight in panels, and the bias beside it."""

    packed_Q: Numbers  # numpy, float32 or bf16's bits; the last panel is padded
    # Inputs that a panel holds; the last ones may be padding. Or the address of the panels' table,
    # if they are of few bits (low_bits/products.py).
    layout: int
    num_outputs: int
    num_inputs: int
    bias_N: Tensor | None
    owner: Any = None  # object that owns the memory, kept alive
    low_bit_bytes: int = 0  # of the panels in the table

    @property
    def num_bytes(self) -> int:
        return self.packed_Q.nbytes + self.low_bit_bytes

    @property
    def num_panels(self) -> int:
        """Return the number of panels; the last may hold fewer outputs than the others."""
        return -(-self.num_outputs // PANEL)

    def takes(self, multiplying: Multiplying) -> bool:
        """Return whether these panels can be multiplied that way on this processor."""
        is_possible = multiplying is not IN_PAIRS or HAS_PAIR_PRODUCTS
        return is_possible and self.num_inputs % multiplying.step == 0


def own_panels(weight_NK: Tensor, bias_N: Tensor | None, num_packed: int | None = None) -> Panels:
    """Copy a weight into panels of `num_packed` inputs; by default, all of the weight's inputs."""
    num_outputs, num_inputs = weight_NK.shape
    num_packed = num_inputs if num_packed is None else num_packed
    filled_NK = nn.functional.pad(weight_NK, (0, num_packed - num_inputs, 0, -num_outputs % PANEL))
    panels_PKO = filled_NK.view(-1, PANEL, num_packed).transpose(1, 2).contiguous()
    numbers = as_numpy(panels_PKO.view(-1))
    return Panels(numbers, num_packed, num_outputs, num_inputs, bias_N)


@cache
def _taker(multiply: Any, between: Any) -> Any:
    """Compiled: the parts of a product that no other thread has taken, one after the other."""

    @jit()
    def take_parts(
        _: int, taken: Ints, part_rows: int, part_panels: int, num_panels: int,
        rows: Any, packed_Q: Numbers, bias_N: Numbers, out_RN: Numbers, layout: int, chain: int,
    ) -> None:  # fmt: skip
        """Multiply blocks of rows by groups of panels. `taken`: the number of parts taken, [1]."""
        num_groups = (num_panels + part_panels - 1) // part_panels
        num_rows = out_RN.shape[0]
        num_parts = (num_rows + part_rows - 1) // part_rows * num_groups
        part = take_next(taken, 0)
        while part < num_parts:
            top, first = part // num_groups * part_rows, part % num_groups * part_panels
            stop = min(top + part_rows, num_rows)
            end = min(first + part_panels, num_panels)
            multiply(
                between(rows, top, stop), packed_Q, bias_N, out_RN[top:stop], layout, chain,
                first, end,
            )  # fmt: skip
            part = take_next(taken, 0)

    return take_parts


def part_sizes(num_rows: int, num_panels: int, num_threads: int) -> tuple[int, int]:
    """Return the rows and the panels of a part, so that each thread can have several parts.

    Rows of a block are few only if panels are, because each part widens its panels anew. They are
    whole tiles of this file, unless these would exceed one pass over a panel. One thread has one
    part.
    """
    if num_threads == 1:
        return max(1, num_rows), num_panels
    wanted = _PARTS_PER_THREAD * num_threads
    least_blocks = -(-num_rows // BLOCK_ROWS)
    most_blocks = max(least_blocks, num_rows // _FEWEST_ROWS, 1)
    num_blocks = min(max(least_blocks, -(-wanted // num_panels)), most_blocks)
    rows = -(-num_rows // num_blocks)
    tile = _TILES[0][0]
    return min(-(-rows // tile) * tile, BLOCK_ROWS), max(1, num_blocks * num_panels // wanted)


class RowProducts:
    """Rows times one weight in panels."""

    def __init__(self, panels: Panels, chain: int, multiplying: Multiplying) -> None:
        """Prepare the product. `chain`: inputs of one chain of sums."""
        self._panels, self.chain, self.multiplying = panels, chain, multiplying
        self.packed_Q, self.layout = panels.packed_Q, panels.layout
        self.num_bytes = panels.num_bytes
        bias_N = panels.bias_N
        self.bias_N = np.empty(0, self.packed_Q.dtype) if bias_N is None else as_numpy(bias_N)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x, [..., K] -> [..., N]; x is contiguous."""
        panels = self._panels
        assert x.dtype == self.multiplying.dtype, "the kernel reads bits"
        # numpy reshapes here, because torch takes twice as long for each of these calls.
        out_RN = self.multiply(as_numpy(x).reshape(-1, panels.num_inputs))
        return as_tensor(out_RN.reshape(*x.shape[:-1], panels.num_outputs), x.dtype)

    def multiply(self, x_RK: Numbers) -> Numbers:
        """Multiply rows, [R, K] -> [R, N]; numpy arrays of float32 or of bf16's bits."""
        num_threads, num_panels = self._num_threads(len(x_RK)), self._panels.num_panels
        out_RN = np.empty((len(x_RK), self._panels.num_outputs), x_RK.dtype)
        arguments = (
            np.zeros(1, np.int64), *part_sizes(len(x_RK), num_panels, num_threads), num_panels,
            self._rows(x_RK, num_threads), self.packed_Q, self.bias_N, out_RN, self.layout,
            self.chain,
        )  # fmt: skip
        take_parts = _taker(self.multiplying.multiply, self.multiplying.between)
        run_on_threads(take_parts, num_threads, *arguments)
        return out_RN

    def _rows(self, x_RK: Numbers, num_threads: int) -> Any:  # noqa: ARG002
        return self.multiplying.rows_for(x_RK)

    def _num_threads(self, num_rows: int) -> int:
        """Return how many threads have enough to do."""
        panels = self._panels
        work = num_rows * panels.num_inputs * panels.num_outputs
        return num_threads_for(max(panels.num_bytes // _BYTES_PER_THREAD, work // _WORK_PER_THREAD))
