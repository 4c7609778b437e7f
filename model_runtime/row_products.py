"""Products of a few rows with a packed weight, at the speed at which memory gives the weight.

A decode step multiplies one row, or a few, with every weight of the model. oneDNN takes about
twice as long for that as reading the weight takes; for many rows it is as fast as the processor.
So few rows are multiplied here, over the very memory that oneDNN has packed: panels of 64 outputs,
in each one the inputs in order. And in the very order of its sums, so that a row's bits do not
depend on which of the two computed it: a number is one chain over the inputs, or one for each block
of them, added up. How long a block is, nobody promises; it is found by trial, and where no trial
gives oneDNN's bits, all rows stay with oneDNN.

Shapes: R = rows, K = inputs, N = outputs, Q = numbers in packed memory.
"""

import ctypes
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_runtime.bfloat16 import as_numpy, as_tensor, narrow, widen
from model_runtime.compiled import jit
from model_runtime.kernel_threads import run_shares
from model_runtime.lane_pairs import HAS_PAIR_PRODUCTS, add_pair_products
from model_runtime.lane_tiles import add_products, load_sums, no_sums, store_sums
from model_runtime.lanes import ask_for

MOST_ROWS = 16
PANEL = 64  # outputs whose weights lie together
_CHUNK = 64  # inputs of a panel that stay in the fastest cache while all rows pass
_COLUMNS = 4  # registers of a panel
_CHAINS = (512, 1024, 2048, 4096)  # inputs of a chain; to be tried after all of them
_LINE_BYTES = 64
_AHEAD_BYTES = 32 << 10
_BYTES_PER_SHARE = 4 << 20  # a thread's part below which waking it costs more than it gives


def _adder(num_rows: int, add: Any, step: int) -> Any:
    """Compiled: so many rows times a chunk of a panel; `add` multiplies `step` inputs at once."""

    @jit(inline=True)
    def add_chunk(
        x_RK: Any, row: int, chunk: int, stop: int, begin: int, packed_Q: Any, base: int, sums: Any
    ) -> None:  # fmt: skip
        num_inputs = x_RK.shape[1]
        line, ahead = _LINE_BYTES // packed_Q.itemsize, _AHEAD_BYTES // packed_Q.itemsize
        tile = load_sums(sums, row * PANEL, PANEL, num_rows, _COLUMNS)
        if chunk == begin:
            tile = no_sums(num_rows, _COLUMNS)
        for k in range(chunk, stop, step):
            # Rows after the first four find the chunk near, and leave memory idle otherwise.
            for at in range(base + k * PANEL, base + (k + step) * PANEL, line):
                ask_for(packed_Q, at + ahead)
            factor = row * num_inputs + k
            tile = add(tile, x_RK, factor, num_inputs, packed_Q, base + k * PANEL, _COLUMNS)
        store_sums(sums, row * PANEL, PANEL, tile, _COLUMNS)

    return add_chunk


def _multiplier(add: Any, step: int) -> Any:
    """Compiled: rows times panels."""
    add_4, add_2, add_1 = (_adder(num_rows, add, step) for num_rows in (4, 2, 1))

    @jit()
    def multiply(
        x_RK: Any, packed_Q: Any, bias_N: Any, out_RN: Any, num_packed: int, chain: int,
        first: int, behind: int,
    ) -> None:  # fmt: skip
        """Outputs of panels `first` to `behind` - 1; a panel holds `num_packed` inputs."""
        num_rows, num_inputs = x_RK.shape
        num_outputs = out_RN.shape[1]
        sums = np.empty((MOST_ROWS, PANEL), np.float32)
        totals = np.empty((MOST_ROWS, PANEL), np.float32)
        bias = np.empty(PANEL, np.float32)
        for panel in range(first, behind):
            base = panel * PANEL * num_packed
            for begin in range(0, num_inputs, chain):
                end = min(num_inputs, begin + chain)
                for chunk in range(begin, end, _CHUNK):
                    stop = min(end, chunk + _CHUNK)
                    row = 0
                    while row < num_rows:
                        left = num_rows - row
                        arguments = (x_RK, row, chunk, stop, begin, packed_Q, base, sums)
                        if left >= 4:
                            add_4(*arguments)
                            row += 4
                        elif left >= 2:
                            add_2(*arguments)
                            row += 2
                        else:
                            add_1(*arguments)
                            row += 1
                for r in range(num_rows):
                    for n in range(PANEL):
                        totals[r, n] = sums[r, n] if begin == 0 else totals[r, n] + sums[r, n]
            at = panel * PANEL
            width = min(PANEL, num_outputs - at)
            if bias_N.shape[0]:
                widen(bias_N[at : at + width], bias)
                for r in range(num_rows):
                    for n in range(width):
                        totals[r, n] += bias[n]
            for r in range(num_rows):
                narrow(totals[r, :width], out_RN[r, at : at + width])

    return multiply


multiply_numbers = _multiplier(add_products, 1)
multiply_pairs = _multiplier(add_pair_products, 2)


def is_available() -> bool:
    """Whether this build of torch tells where packed memory is."""
    return hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")


def find_chain(weight: "PackedWeight", x_RK: Tensor, expected_RN: Tensor) -> int | None:
    """How many inputs make a chain of oneDNN's sums: what gives its bits. None: nothing does."""
    if not is_available() or not weight.has_panels():
        return None
    for chain in dict.fromkeys((weight.num_inputs, *_CHAINS)):
        products = RowProducts(weight, chain)
        found = torch.cat([products(rows) for rows in torch.split(x_RK, MOST_ROWS)])
        if torch.equal(found, expected_RN):
            return chain
    return None


class PackedWeight(NamedTuple):
    """A weight as mkldnn._reorder_linear_weight has packed it, and the bias beside it."""

    packed: Tensor
    num_outputs: int
    num_inputs: int
    bias_N: Tensor | None

    @property
    def num_panels(self) -> int:
        """The last may be filled up with zeros."""
        return -(-self.num_outputs // PANEL)

    @property
    def num_bytes(self) -> int:
        """Of the packed memory."""
        found: int = torch.ops.mkldnn._nbytes(self.packed)
        return found

    @property
    def num_packed(self) -> int:
        """Inputs in a panel; the last may be filled up with zeros."""
        return self.num_bytes // self.packed.dtype.itemsize // (self.num_panels * PANEL)

    def has_panels(self) -> bool:
        """Whether the memory can be panels, and a kernel for its numbers is there.

        Whether they are where they are taken to be, only a trial shows: these bounds keep it from
        reading what is not there.
        """
        dtype = self.packed.dtype
        return (
            self.num_packed >= self.num_inputs
            and self.num_packed * self.num_panels * PANEL * dtype.itemsize == self.num_bytes
            and (dtype == torch.float32 or (HAS_PAIR_PRODUCTS and self.num_inputs % 2 == 0))
        )


class RowProducts:
    """Up to MOST_ROWS rows times one packed weight."""

    def __init__(self, weight: PackedWeight, chain: int) -> None:
        """`chain`: inputs of a chain of sums (`find_chain`)."""
        is_float32 = weight.packed.dtype == torch.float32
        self._weight, self.chain = weight, chain  # the weight keeps its memory alive
        self.num_packed = weight.num_packed
        self._kernel = multiply_numbers if is_float32 else multiply_pairs
        pointer = ctypes.cast(
            torch.ops.mkldnn.data_ptr(weight.packed),
            ctypes.POINTER(ctypes.c_float if is_float32 else ctypes.c_uint16),
        )
        num_numbers = weight.num_bytes // weight.packed.dtype.itemsize
        self.packed_Q = np.ctypeslib.as_array(pointer, (num_numbers,))
        bias_N = weight.bias_N
        self.bias_N = np.empty(0, self.packed_Q.dtype) if bias_N is None else as_numpy(bias_N)
        num_shares = max(1, min(torch.get_num_threads(), weight.num_bytes // _BYTES_PER_SHARE))
        edges = [weight.num_panels * share // num_shares for share in range(num_shares + 1)]
        self._shares = list(pairwise(edges))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]; 1 to MOST_ROWS rows in all, x contiguous."""
        weight = self._weight
        assert x.dtype == weight.packed.dtype, "the kernel reads bits"
        # Shapes are numpy's business here: torch takes twice as long for each of these calls.
        out_RN = self.multiply(as_numpy(x).reshape(-1, weight.num_inputs))
        return as_tensor(out_RN.reshape(*x.shape[:-1], weight.num_outputs), x.dtype)

    def multiply(self, x_RK: Any) -> Any:
        """[R, K] -> [R, N], numpy's arrays of float32 or of bf16's bits."""
        out_RN = np.empty((len(x_RK), self._weight.num_outputs), self.packed_Q.dtype)
        arguments = (x_RK, self.packed_Q, self.bias_N, out_RN, self.num_packed, self.chain)
        run_shares(lambda share: self._kernel(*arguments, *share), self._shares)
        return out_RN
