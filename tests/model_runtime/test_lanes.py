"""Sixteen numbers at once, against numpy."""

from typing import Any

import numba
import numpy as np
import pytest

from model_runtime.lanes import (
    WIDTH,
    add,
    exp,
    fma,
    largest,
    load,
    multiply,
    spread,
    store,
    subtract,
    total,
)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def results(first: Any, second: Any, at: int, out: Any) -> Any:
    """Every operation on sixteen numbers of each array."""
    a, b = load(first, at), load(second, at)
    store(out, 0, add(a, b))
    store(out, WIDTH, subtract(a, b))
    store(out, 2 * WIDTH, multiply(a, b))
    store(out, 3 * WIDTH, fma(a, b, spread(np.float32(1.5))))
    store(out, 4 * WIDTH, exp(a))
    return largest(a), total(a)


def test_every_operation_is_numpys_on_each_lane() -> None:
    """and `at` counts through all dimensions"""
    rng = np.random.default_rng(0)
    first = rng.normal(size=(3, 24)).astype(np.float32)
    second = rng.normal(size=(3, 24)).astype(np.float32)
    out = np.zeros((5, WIDTH), np.float32)
    peak, summed = results(first, second, 40, out)
    a, b = first.ravel()[40:56], second.ravel()[40:56]
    assert np.array_equal(out[0], a + b)
    assert np.array_equal(out[1], a - b)
    assert np.array_equal(out[2], a * b)
    exact = a.astype(np.float64) * b + 1.5
    assert np.array_equal(out[3], exact.astype(np.float32)), "not rounded once"
    assert peak == a.max()
    in_order = np.float32(0)
    for each in a:
        in_order += each
    assert summed == in_order


def test_exp_is_float32s() -> None:
    """to two units in the last place where a share can be; 0 below, NaN stays NaN"""
    x = np.linspace(-86.9, 0, 4096, dtype=np.float32)
    out = np.zeros((5, WIDTH), np.float32)
    for at in range(0, len(x), WIDTH):
        results(x, x, at, out)
        exact = np.exp(x[at : at + WIDTH].astype(np.float64))
        assert np.abs(out[4] / exact - 1).max() < 2.5e-7
    ends = np.array([-np.inf, -1e30, -100, -87.5, np.nan, 0, 1, -0.0] * 2, np.float32)
    results(ends, ends, 0, out)
    assert out[4, :4].tolist() == [0, 0, 0, 0]
    assert np.isnan(out[4, 4])
    assert out[4, 5:8] == pytest.approx([1, np.e, 1])


def test_bfloat16_is_widened_as_it_is_loaded() -> None:
    """its bits are a float32's upper half"""
    wide = np.linspace(-3, 3, WIDTH, dtype=np.float32)
    bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (bits.astype(np.uint32) << 16).view(np.float32)
    out = np.zeros((5, WIDTH), np.float32)
    results(bits, np.zeros(WIDTH, np.float32), 0, out)
    assert np.array_equal(out[0], rounded)
