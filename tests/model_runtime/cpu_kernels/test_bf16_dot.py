"""bfloat16 in pairs, against torch's rounding and float64's sums.

Shapes: R = rows, N = numbers of a sum, D = sums of a row.
"""

from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.cpu_kernels.attention.bf16_dot import (
    FIRST,
    HAS_PAIR_PRODUCTS,
    SECOND,
    add_half_products,
    add_pair_products,
    copy_as_pairs,
    store_pairs,
)
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.register_sums import load_sums, store_sums
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, load, store

pytestmark = pytest.mark.skipif(not HAS_PAIR_PRODUCTS, reason="no products of pairs here")


def rounded(numbers: Any) -> Any:
    """The bits of the numbers in bfloat16, by torch."""
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()


def widened(bits: Any) -> Any:
    """The numbers of these bits in float64."""
    return torch.from_numpy(bits).view(torch.bfloat16).double().numpy()


@jit()
def write_kv(first: Any, second: Any, out: Any) -> None:
    """Rounded alone, rounded as pairs, and the alone ones as pairs again."""
    store(out, 0, load(first, 0))
    store(out, WIDTH, load(second, 0))
    store_pairs(out, 2 * WIDTH, load(first, 0), load(second, 0))
    copy_as_pairs(out, 4 * WIDTH, out, 0, WIDTH)


def test_numbers_are_rounded_to_nearest_even_and_put_side_by_side() -> None:
    """Torch's rounding to bfloat16 is the reference, for ties, infinities and NaN too."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, WIDTH)).astype(np.float32)
    first[:4] = [1 + 2**-8, 1 + 3 * 2**-8, np.inf, -0.0]
    out = np.zeros(6 * WIDTH, np.uint16)
    write_kv(first, second, out)
    expected = rounded(np.stack((first, second)))
    assert np.array_equal(out[: 2 * WIDTH], expected.ravel())
    assert np.array_equal(out[2 * WIDTH : 4 * WIDTH], expected.T.ravel())
    assert np.array_equal(out[4 * WIDTH :], expected.T.ravel())
    # A NaN whose payload is in the lower half: cut off, it would be infinite.
    first[5] = np.array([0x7F800001], np.uint32).view(np.float32)[0]
    write_kv(first, second, out)
    assert np.isnan(widened(out)[[5, 2 * WIDTH + 10]]).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (8, 2)])
def test_a_tile_is_sums_of_pairs_of_products(rows: int, columns: int) -> None:
    """Half of a pair is one product, even if the other half is NaN."""

    @jit()
    def multiplied(factors_RN: Any, numbers_ND: Any, sums_RD: Any) -> None:
        width = numbers_ND.shape[1]
        sums = load_sums(sums_RD, 0, width, rows, columns)
        for n in range(0, numbers_ND.shape[0], 2):
            number = n * width
            sums = add_pair_products(
                sums, factors_RN, n, factors_RN.shape[1], numbers_ND, number, columns
            )
        store_sums(sums_RD, 0, width, sums, columns)

    @jit()
    def halves(factors_RN: Any, numbers_ND: Any, sums_RD: Any) -> None:
        before = load(sums_RD, 0)
        second = add_half_products(before, factors_RN, 0, numbers_ND, 0, SECOND)
        width = numbers_ND.shape[1]
        store(sums_RD, 0, add_half_products(second, factors_RN, 2, numbers_ND, 2 * width, FIRST))

    rng = np.random.default_rng(0)
    factors_RN = rounded(rng.normal(size=(rows, 6)).astype(np.float32))
    by_turns = rounded(rng.normal(size=(3, columns * WIDTH, 2)).astype(np.float32))
    sums_RD = rng.normal(size=(rows, columns * WIDTH)).astype(np.float32)
    numbers_ND = widened(by_turns).transpose(0, 2, 1).reshape(6, -1)
    expected = sums_RD + widened(factors_RN) @ numbers_ND
    got = sums_RD.copy()
    multiplied(factors_RN, by_turns.reshape(6, -1), got)
    assert got == pytest.approx(expected, abs=2e-6)

    expected = sums_RD[0, :WIDTH] + (widened(factors_RN)[0, 1:3] @ numbers_ND[1:3, :WIDTH])
    by_turns[0, :, 0] = by_turns[1, :, 1] = rounded(np.array([np.nan], np.float32))[0]
    factors_RN[0, [0, 3]] = 0
    got = sums_RD.copy()
    halves(factors_RN, by_turns.reshape(6, -1), got)
    assert got[0, :WIDTH] == pytest.approx(expected, abs=2e-6)
