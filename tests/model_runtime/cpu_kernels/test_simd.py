"""A register of numbers at once, against numpy."""

from typing import Any

import numba
import numpy as np
import pytest
import torch

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    exp,
    fma,
    load,
    multiply,
    reduce_add,
    reduce_max,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.target import target_features, vectors


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def results(first: Any, second: Any, at: int, out: Any) -> Any:
    """Every operation on a register of each array's numbers."""
    a, b = load(first, at), load(second, at)
    store(out, 0, add(a, b))
    store(out, WIDTH, subtract(a, b))
    store(out, 2 * WIDTH, multiply(a, b))
    store(out, 3 * WIDTH, fma(a, b, broadcast(np.float32(1.5))))
    store(out, 4 * WIDTH, exp(a))
    return reduce_max(a), reduce_add(a)


def test_every_operation_is_numpys_on_each_lane() -> None:
    """The offset 40 counts through all dimensions of the array."""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(3, 24)).astype(np.float32)
    second = rng.normal(size=(3, 24)).astype(np.float32)
    out = np.zeros((5, WIDTH), np.float32)
    peak, summed = results(first, second, 40, out)
    a, b = first.ravel()[40 : 40 + WIDTH], second.ravel()[40 : 40 + WIDTH]
    assert np.array_equal(out[0], a + b)
    assert np.array_equal(out[1], a - b)
    assert np.array_equal(out[2], a * b)
    exact = a.astype(np.float64) * b + 1.5
    if vectors().has_fma:
        assert np.array_equal(out[3], exact.astype(np.float32)), "not rounded once"
    assert out[3] == pytest.approx(exact, rel=1e-6)
    assert peak == a.max()
    in_order = np.float32(0)
    for each in a:
        in_order += each
    assert summed == in_order


def test_exp_is_float32s() -> None:
    """The kernel's exp is within two units in the last place; NaN stays NaN, far below 0 is 0."""
    x = np.linspace(-86.9, 0, 4096, dtype=np.float32)
    out = np.zeros((5, WIDTH), np.float32)
    for at in range(0, len(x), WIDTH):
        results(x, x, at, out)
        exact = np.exp(x[at : at + WIDTH].astype(np.float64))
        assert np.abs(out[4] / exact - 1).max() < 2.5e-7
    ends = np.array([-np.inf, -1e30, -100, -87.5, np.nan, 0, 1, -0.0] * 2, np.float32)
    found = np.empty_like(ends)
    for at in range(0, len(ends), WIDTH):
        results(ends, ends, at, out)
        found[at : at + WIDTH] = out[4]
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert np.isnan(found[4])
    assert found[5:8] == pytest.approx([1, np.e, 1])


def test_bfloat16_is_widened_as_it_is_loaded() -> None:
    """The bits of a bfloat16 are the upper half of a float32's."""
    wide = np.linspace(-3, 3, WIDTH, dtype=np.float32)
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    out = np.zeros((5, WIDTH), np.float32)
    results(bits, np.zeros(WIDTH, np.float32), 0, out)
    assert np.array_equal(out[0], rounded)


@numba.njit  # type: ignore[untyped-decorator]
def rounded(numbers: Any, out: Any) -> None:
    """Each register of numbers, stored as bfloat16."""
    for at in range(0, len(numbers), WIDTH):
        store(out, at, load(numbers, at))


def test_numbers_are_rounded_to_bfloat16_as_torch_does() -> None:
    """Rounding to bfloat16 is to nearest even, with or without an instruction for it."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    ties = np.arange(0, 1 << 14, dtype=np.uint32) << 15  # halfway between two numbers
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1.0, 65504.0] * 2, np.float32)
    for numbers in (bits.view(np.float32), ties.view(np.float32), special):
        out = np.empty(len(numbers), np.uint16)
        rounded(numbers, out)
        expected = as_numpy(torch.from_numpy(numbers).to(torch.bfloat16))
        is_number = ~np.isnan(numbers)
        if "avx512bf16" in target_features():  # which takes numbers below 2^-126 for zero
            is_number &= np.abs(numbers) >= np.finfo(np.float32).tiny
        assert np.array_equal(out[is_number], expected[is_number])
        widened = (out.astype(np.uint32) << 16).view(np.float32)
        assert np.isnan(widened[np.isnan(numbers)]).all()
