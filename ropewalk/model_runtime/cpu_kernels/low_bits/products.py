"""Rows times weights of few bits, with the bits of a float32 product of the widened weights.

A chunk of a panel is widened once for all rows (`widen.py`), and then multiplied as a float32
weight is (`skinny_gemm.py`). The weights of one, two or four rows stay in registers in between.

The table of a product has a row for each panel: its address and the number of its format. So the
linears that share an input may have different formats.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32, Format
from ropewalk.model_runtime.cpu_kernels.low_bits.loads import table_at
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import LowBitPanels, joined_table
from ropewalk.model_runtime.cpu_kernels.low_bits.widen import (
    FEW_ROWS,
    few_rows_adder,
    numbers_of,
    widener,
)
from ropewalk.model_runtime.cpu_kernels.register_sums import add_products
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (
    CHUNK,
    PANEL,
    Multiplying,
    Panels,
    RowProducts,
    add_chain,
    as_they_are,
    block_rows,
    rows_adder,
    widened,
    write_totals,
)
from ropewalk.model_runtime.cpu_kernels.trials import multiplies_pairs


@cache
def _multiplier(numbers: tuple[int, ...]) -> Any:
    """Compiled: rows times panels of the formats with these numbers."""
    widen = widener(numbers)
    add_few, has_few = few_rows_adder(numbers), len(FEW_ROWS) > 1
    add_rows = rows_adder(add_products, 1, 0)

    @jit()
    def multiply(
        x_RK: Floats, _: Numbers, bias_N: Numbers, out_RN: Numbers, layout: int,
        chain: int, first_panel: int, end_panel: int,
    ) -> None:  # fmt: skip
        """Write the outputs of panels `first_panel` to `end_panel` - 1.

        `layout` is the address of the table of panels.
        """
        num_inputs = x_RK.shape[1]
        table_P2 = carray(table_at(layout), (end_panel, 2))
        most = block_rows(x_RK.shape[0])
        sums = np.empty((most, PANEL), np.float32)
        totals = np.empty((most, PANEL), np.float32)
        bias = np.empty(PANEL, np.float32)
        wide_Q = np.empty(CHUNK * PANEL, np.float32)
        for top in range(0, x_RK.shape[0], most):
            num_rows = min(most, x_RK.shape[0] - top)
            for panel in range(first_panel, end_panel):
                address, number = table_P2[panel, 0], table_P2[panel, 1]
                for begin in range(0, num_inputs, chain):
                    end = min(num_inputs, begin + chain)
                    if num_rows == 1 or (has_few and num_rows in (2, 4)):
                        add_few(number, address, begin, end, x_RK, top, num_rows, sums)
                        add_chain(sums, num_rows, totals, begin)
                        continue
                    for chunk in range(begin, end, CHUNK):
                        stop = min(end, chunk + CHUNK)
                        widen(number, address, chunk, stop, wide_Q)
                        base = -chunk * PANEL
                        add_rows(x_RK, top, num_rows, chunk, stop, begin, wide_Q, base, sums)
                    add_chain(sums, num_rows, totals, begin)
                write_totals(totals, num_rows, bias_N, bias, out_RN, top, panel * PANEL)

    return multiply


class LowBits:
    """The kernels of a model with weights of these formats, for a number type of its rows."""

    def __init__(
        self, formats: Iterable[Format], dtype: torch.dtype, *, has_float_rows: bool = False
    ) -> None:
        """Find the kernels; each is compiled at its first use.

        `has_float_rows`: the caller widens bfloat16 rows to float32 itself.
        """
        kinds = set(formats)
        self.dtype = dtype
        self._in_pairs: Callable[[Panels], RowProducts] | None = None
        if not has_float_rows and multiplies_pairs(dtype) and kinds - {FLOAT32}:
            # Models in float32 do not import these kernels.
            from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.grouped_products import (  # noqa: PLC0415
                GroupedProducts,
                pairing_of,
            )

            grouping = pairing_of(kinds)
            self._in_pairs = partial(GroupedProducts, grouping=grouping)
            self.multiplying = grouping.multiplying
        else:
            rows_for = as_they_are if dtype == torch.float32 else widened
            self.multiplying = Multiplying(dtype, 1, rows_for, _multiplier(numbers_of(kinds)))

    def row_products(self, panels: Panels, chain: int) -> RowProducts:
        """Return the product of rows by panels. `chain`: inputs of one chain of sums."""
        if self._in_pairs is not None:
            return self._in_pairs(panels)
        return RowProducts(panels, chain, self.multiplying)

    def panels(self, weights: Sequence[LowBitPanels], bias_N: Tensor | None) -> Panels:
        """Return the panels of several weights with outputs one after the other."""
        table_P2 = np.ascontiguousarray(joined_table(weights))
        return Panels(
            np.empty(0, np.float32 if self.dtype == torch.float32 else np.uint16),
            table_P2.ctypes.data,
            sum(each.num_outputs for each in weights),
            weights[0].num_inputs,
            bias_N,
            owner=(table_P2, weights),
            low_bit_bytes=sum(each.memory.nbytes for each in weights),
        )
