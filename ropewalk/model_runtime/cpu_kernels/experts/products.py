"""Products of rows with the experts that they chose, and the weighted sum of each row's experts.

A pair is a row and one of its experts. Pairs are in the order of experts, and of rows within an
expert. So the rows of an expert lie together, and each panel is read once for up to 16 of them. A
row's pairs are in the order of its experts, and they are added in this order, as one chain. Every
sum is the chain of `skinny_gemm.py` over all inputs. So no bit depends on other rows, or on the
number of threads.

An expert that no row chose is not read.

Shapes: R = rows, C = choices of a row, S = pairs, E = experts, A = experts that some row chose,
M = rows of an expert, K = inputs, N = outputs, W = outputs with padding to whole panels,
Q = elements of packed memory.
"""

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import narrow, widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, broadcast, fma, load, store
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import PANEL, as_they_are
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, num_threads_for, run_shares

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.formats import Format

Integers = NDArray[np.int64]
_WORK_PER_SHARE = 1 << 18  # bytes; with a smaller part, a thread costs more than it saves
_NUMBERS_PER_SHARE = 1 << 14  # that are added
ROWS_PER_READ = 8  # that take about as long to multiply as a panel takes to read


class Pairs(NamedTuple):
    """The pairs of a step, in order."""

    experts_A: Integers  # ascending
    starts: Integers  # [A + 1]: the first pair of each expert, and the number of pairs
    row_of_S: Integers
    slots_RC: Integers  # pairs of each row, ascending
    weights_RC: Floats  # of these pairs


@jit()
def group_pairs(
    choice_RC: Integers, weights_RC: Floats, num_experts: int
) -> tuple[Integers, Integers, Integers, Integers, Floats]:
    """Return the fields of Pairs."""
    num_rows, num_choices = choice_RC.shape
    first = np.zeros(num_experts + 1, np.int64)
    for r in range(num_rows):
        for c in range(num_choices):
            first[choice_RC[r, c] + 1] += 1
    num_active = 0
    experts_A = np.empty(num_experts, np.int64)
    starts = np.zeros(num_experts + 1, np.int64)
    for expert in range(num_experts):
        if first[expert + 1]:
            experts_A[num_active] = expert
            starts[num_active + 1] = starts[num_active] + first[expert + 1]
            num_active += 1
        first[expert + 1] += first[expert]
    row_of_S = np.empty(num_rows * num_choices, np.int64)
    slots_RC = np.empty((num_rows, num_choices), np.int64)
    sorted_RC = np.empty((num_rows, num_choices), np.float32)
    for r in range(num_rows):
        for c in range(num_choices):
            slot, weight = first[choice_RC[r, c]], weights_RC[r, c]
            first[choice_RC[r, c]] += 1
            row_of_S[slot] = r
            at = c
            while at > 0 and slots_RC[r, at - 1] > slot:
                slots_RC[r, at] = slots_RC[r, at - 1]
                sorted_RC[r, at] = sorted_RC[r, at - 1]
                at -= 1
            slots_RC[r, at], sorted_RC[r, at] = slot, weight
    return experts_A[:num_active], starts[: num_active + 1], row_of_S, slots_RC, sorted_RC


def grouped(choice_RC: Integers, weights_RC: Floats, num_experts: int) -> Pairs:
    """Return the pairs of rows and their experts. Raises IndexError for an unknown expert."""
    if choice_RC.size and not 0 <= choice_RC.min() <= choice_RC.max() < num_experts:
        raise IndexError(f"experts must be < {num_experts}. Given: {choice_RC.max()}")
    return Pairs(*group_pairs(choice_RC, weights_RC, num_experts))


@jit()
def rows_of(x_RK: Numbers, row_of_S: Integers, top: int, bottom: int, num_inputs: int) -> Floats:
    """Return the rows of pairs `top` to `bottom` - 1 in float32."""
    rows_MK = np.empty((bottom - top, num_inputs), np.float32)
    for m in range(bottom - top):
        widen(x_RK[row_of_S[top + m], :num_inputs], rows_MK[m])
    return rows_MK


class ExpertProduct(NamedTuple):
    """The compiled functions that multiply float32 rows by panels of one expert."""

    multiply: Any  # rows times panels of one weight (skinny_gemm.py)
    rows_for: Any = as_they_are  # converts [M, K] to the input of `multiply`


@cache
def multiplier(product: ExpertProduct) -> Any:
    """Compiled: the rows of each expert times its panels."""
    multiply, rows_for = product

    @jit()
    def run(
        x_RK: Numbers, row_of_S: Integers, experts_A: Integers, starts: Integers, num_inputs: int,
        packed_Q: Numbers, packed_step: int, layout: int, layout_step: int, bias_EW: Floats,
        out_SW: Floats, first: int, end: int,
    ) -> None:  # fmt: skip
        """Compute panels `first` to `end` - 1 of those of all experts, one after the other.

        Expert e begins at element `packed_step` * e of the packed memory, or has the layout
        `layout` + `layout_step` * e.
        """
        num_panels = out_SW.shape[1] // PANEL
        for place in range(first // num_panels, -(-end // num_panels)):
            expert, top, bottom = experts_A[place], starts[place], starts[place + 1]
            rows_MK = rows_of(x_RK, row_of_S, top, bottom, num_inputs)
            multiply(
                rows_for(rows_MK), packed_Q[packed_step * expert :], bias_EW[expert],
                out_SW[top:bottom], layout + layout_step * expert, num_inputs,
                max(0, first - place * num_panels), min(num_panels, end - place * num_panels),
            )  # fmt: skip

    return run


class ExpertPanels(NamedTuple):
    """One matrix of all experts of a layer, in panels."""

    product: ExpertProduct
    num_inputs: int
    num_panels: int  # of one expert
    panel_bytes: int
    packed_Q: Numbers  # float32 or bf16's bits; empty if the weights have few bits
    packed_step: int
    layout: int
    layout_step: int
    bias_EW: Floats  # [E, 0] without biases
    owner: Any = None  # object that owns the memory, kept alive
    formats: frozenset["Format"] = frozenset()  # of few bits

    def multiply(self, x_RK: Numbers, row_of_S: Integers, pairs: Pairs) -> Floats:
        """Multiply the rows of all pairs, [R, K] -> [S, W]; `row_of_S` are rows of `x_RK`."""
        out_SW = np.empty((len(row_of_S), self.num_panels * PANEL), np.float32)
        arguments = (
            x_RK, row_of_S, pairs.experts_A, pairs.starts, self.num_inputs, self.packed_Q,
            self.packed_step, self.layout, self.layout_step, self.bias_EW, out_SW,
        )  # fmt: skip
        run_shares(multiplier(self.product), self._shares(pairs), *arguments)
        return out_SW

    def _shares(self, pairs: Pairs) -> list[tuple[int, int]]:
        """Split the panels of all experts into parts that take about as long."""
        cost_A = 1 + np.diff(pairs.starts) / ROWS_PER_READ  # of a panel
        ends_A = self.num_panels * np.cumsum(cost_A)
        total = float(ends_A[-1])
        most = int(total * self.panel_bytes / _WORK_PER_SHARE)
        num_shares = num_threads_for(most)
        if num_shares == 1:
            return [(0, len(cost_A) * self.num_panels)]
        targets = total * np.arange(num_shares + 1) / num_shares
        places = np.minimum(np.searchsorted(ends_A, targets), len(cost_A) - 1)
        inside = self.num_panels - (ends_A[places] - targets) / cost_A[places]
        edges = (places * self.num_panels + np.rint(inside).astype(np.int64)).tolist()
        edges[0], edges[-1] = 0, len(cost_A) * self.num_panels
        return [each for each in pairwise(edges) if each[0] < each[1]]


@jit()
def _add_rows(
    y_SW: Floats, slots_RC: Integers, weights_RC: Floats, out_RN: Numbers, first: int, end: int
) -> None:
    width = y_SW.shape[1]
    total_W = np.empty(width, np.float32)
    for r in range(first, end):
        total_W[:] = np.float32(0.0)
        for c in range(slots_RC.shape[1]):
            weight = broadcast(weights_RC[r, c])
            at = slots_RC[r, c] * width
            for w in range(0, width, WIDTH):
                store(total_W, w, fma(weight, load(y_SW, at + w), load(total_W, w)))
        narrow(total_W[: out_RN.shape[1]], out_RN[r])


def add_experts(y_SW: Floats, pairs: Pairs, out_RN: Numbers) -> None:
    """Write the weighted sum of each row's experts, in their order, rounded once."""
    num_rows = len(out_RN)
    shares = even_shares(num_rows, 1, num_threads_for(y_SW.size // _NUMBERS_PER_SHARE))
    run_shares(_add_rows, shares, y_SW, pairs.slots_RC, pairs.weights_RC, out_RN)
