"""Kernels of states against their formulas in float64, and against their own bits in parts.

Shapes: T = tokens, C = channels, W = taps, H = value heads, K, D = dimensions of keys and values.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.simd import WIDTH
from ropewalk.model_runtime.cpu_kernels.states.convolution import NO_SLOT, short_convolution
from ropewalk.model_runtime.cpu_kernels.states.delta_rule import (
    DeltaInputs,
    DeltaWeights,
    gated_delta,
)
from ropewalk.model_runtime.cpu_kernels.threads import even_shares

NUM_TOKENS = 150  # more than two blocks of the kernel
NUM_TAPS = 4
Array = NDArray[Any]


@dataclass
class Case:
    """A layer's weights and the products of one sequence's tokens."""

    inputs: DeltaInputs
    weights: DeltaWeights
    num_key_heads: int
    key_dim: int
    dim: int

    @property
    def num_heads(self) -> int:
        """H."""
        return self.inputs.beta_TH.shape[1]

    def slots(self, count: int) -> tuple[Array, Array]:
        """Slots full of NaN, so that a number that was not written shows."""
        num_channels = self.inputs.x_TY.shape[1]
        tail = np.full((count, NUM_TAPS - 1, num_channels), np.nan, np.float32)
        shape = (count, self.num_heads, self.key_dim, self.dim)
        return tail, np.full(shape, np.nan, np.float32)

    def run(
        self, parts: list[tuple[int, int, int, int]], slots: tuple[Array, Array], shares: int = 1
    ) -> Array:
        """The output of these parts, [T, H * D]; rows of no part are NaN."""
        out = np.full(self.inputs.gate_TY.shape, np.nan, np.float32)
        rows = np.array(parts, np.int64)
        for share in even_shares(self.num_key_heads, 1, shares):
            gated_delta(
                self.num_key_heads, rows, tuple(self.inputs), tuple(self.weights), *slots, out,
                *share,
            )  # fmt: skip
        return out


def case(kind: str, seed: int = 0, *, num_key_heads: int = 2, group: int = 2) -> Case:
    """A case of random numbers, or with the extremes of `kind`."""
    rng = np.random.default_rng(seed)
    key_dim, dim = 2 * WIDTH, 5 * WIDTH  # of values: four registers together, and one alone
    num_heads = num_key_heads * group

    def drawn(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    num_channels = 2 * num_key_heads * key_dim + num_heads * dim
    inputs = DeltaInputs(
        drawn(NUM_TOKENS, num_channels),
        0,
        drawn(NUM_TOKENS, num_heads * dim),
        0,
        drawn(NUM_TOKENS, num_heads),
        drawn(NUM_TOKENS, num_heads),
    )
    weights = DeltaWeights(
        drawn(NUM_TAPS, num_channels),
        -np.exp(rng.standard_normal(num_heads)),
        rng.standard_normal(num_heads),
        drawn(dim),
        np.float32(1e-6),
    )
    if kind == "saturated":
        weights.rate_H[:] = [-1e30, -1e-30, -60.0, 0.0][:num_heads]  # decays of 0 and of 1
        inputs.beta_TH[:] *= 200.0
        inputs.step_TH[:] *= 100.0
    elif kind == "zeros":
        inputs.x_TY[::3] = 0.0  # keys of zero
        inputs.gate_TY[:, ::2] = 0.0
        weights.norm_D[::2] = 0.0
        weights.taps_WC[:, : key_dim // 2] = 0.0
    elif kind == "large":
        inputs.x_TY[:] *= 1e4  # values, and so states, of large norm
        inputs.gate_TY[:] *= 100.0
    return Case(inputs, weights, num_key_heads, key_dim, dim)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-np.clip(x, -700, None)))


def exact(of: Case) -> Array:
    """The formula of Gated DeltaNet (arXiv 2412.06464, equation 10) in float64, [T, H * D]."""
    inputs, weights = of.inputs, of.weights
    x_TC = inputs.x_TY.astype(np.float64)
    padded = np.vstack([np.zeros((NUM_TAPS - 1, x_TC.shape[1])), x_TC])
    mixed = sum(weights.taps_WC[tap] * padded[tap : tap + len(x_TC)] for tap in range(NUM_TAPS))
    mixed = _silu(np.asarray(mixed))
    sides = of.num_key_heads * of.key_dim
    query, key, value = np.split(mixed, [sides, 2 * sides], axis=1)
    query, key = (each.reshape(len(x_TC), of.num_key_heads, of.key_dim) for each in (query, key))
    query, key = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (query, key))
    query = query / np.sqrt(of.key_dim)
    value = value.reshape(len(x_TC), of.num_heads, of.dim)
    outputs = np.empty_like(value)
    group = of.num_heads // of.num_key_heads
    for head in range(of.num_heads):
        state = np.zeros((of.key_dim, of.dim))
        for t in range(len(x_TC)):
            step = np.logaddexp(0, float(inputs.step_TH[t, head]) + weights.step_bias_H[head])
            state = state * np.exp(weights.rate_H[head] * step)
            k = key[t, head // group]
            beta = 1 / (1 + np.exp(-np.clip(float(inputs.beta_TH[t, head]), -700, None)))
            state = state + np.outer(k, beta * (value[t, head] - k @ state))
            outputs[t, head] = query[t, head // group] @ state
    scale = np.sqrt((outputs**2).mean(-1, keepdims=True) + 1e-6)
    normed = outputs / scale * weights.norm_D
    return normed.reshape(len(x_TC), -1) * _silu(inputs.gate_TY.astype(np.float64))


@pytest.mark.parametrize("kind", ["random", "saturated", "zeros", "large"])
def test_the_delta_rule_is_the_formula_within_rounding(kind: str) -> None:
    """With decays of 0 and 1, keys and gates of zero, and states of large norm, too."""
    of = case(kind)
    out = of.run([(0, NUM_TOKENS, NO_SLOT, 0)], of.slots(1))
    expected = exact(of)
    heads = expected.reshape(NUM_TOKENS, -1, of.dim)
    allowed = 2e-4 * np.abs(heads).max(-1, keepdims=True) + 1e-6
    apart = np.abs(out.reshape(heads.shape) - heads)
    assert (apart <= allowed).all(), float((apart - allowed).max())


@pytest.mark.parametrize("kind", ["random", "saturated", "large"])
def test_a_tokens_bits_do_not_depend_on_parts_neighbours_slots_or_shares(kind: str) -> None:
    """One part, many parts over three slots with a sequence beside them, and two shares."""
    of = case(kind, 1)
    whole = of.slots(1)
    expected = of.run([(0, NUM_TOKENS, NO_SLOT, 0)], whole)
    rng = random.Random(2)
    edges = sorted({0, 1, 2, 65, NUM_TOKENS, *(rng.randrange(NUM_TOKENS) for _ in range(6))})
    slots = of.slots(4)
    out, read = np.empty_like(expected), NO_SLOT
    for begin, end in pairwise(edges):
        write = rng.randrange(3)
        rows = of.run([(0, 7, NO_SLOT, 3), (begin, end, read, write)], slots, shares=2)
        out[begin:end] = rows[begin:end]
        assert np.array_equal(rows[: min(7, begin)], expected[: min(7, begin)])
        read = write
    assert np.array_equal(out, expected)
    assert all(np.array_equal(one[read], other[0]) for one, other in zip(slots, whole, strict=True))


def test_a_slot_that_is_read_only_keeps_its_numbers() -> None:
    """A snapshot serves later sequences, so a part that writes elsewhere may not change it."""
    of = case("random", 3)
    slots = of.slots(2)
    of.run([(0, 40, NO_SLOT, 0)], slots)
    before = [each[0].copy() for each in slots]
    of.run([(40, 90, 0, 1)], slots)
    assert all(np.array_equal(each[0], kept) for each, kept in zip(slots, before, strict=True))


@pytest.mark.parametrize("num_taps", [2, 3, 4])
def test_a_short_convolution_is_the_formula_in_any_parts(num_taps: int) -> None:
    """Parts that are shorter than the taps read inputs of several parts before them."""
    rng = np.random.default_rng(4)
    num_tokens, num_channels = 23, 2 * WIDTH
    joined = rng.standard_normal((num_tokens, 3 * num_channels)).astype(np.float32)
    taps, bias = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((num_taps, num_channels), num_channels)
    )
    first, second, value = np.split(joined.astype(np.float64), 3, axis=1)
    padded = np.vstack([np.zeros((num_taps - 1, num_channels)), first * value])
    sums = sum(taps[tap] * padded[tap : tap + num_tokens] for tap in range(num_taps))
    expected = second * (sums + bias)
    found = []
    for edges in ([0, 23], [0, 1, 2, 3, 9, 10, 23]):
        tail = np.full((2, num_taps - 1, num_channels), np.nan, np.float32)
        out = np.empty((num_tokens, num_channels), np.float32)
        read = NO_SLOT
        for begin, end in pairwise(edges):
            part = np.array([(begin, end, read, 1 - max(read, 0))], np.int64)
            rows = np.empty_like(out)
            short_convolution(
                joined, 0, part, taps, bias, tail, np.empty_like(out), rows, 0, num_channels
            )
            out[begin:end] = rows[begin:end]
            read = 1 - max(read, 0)
        assert np.allclose(out, expected, rtol=1e-5, atol=1e-5)
        found.append(out)
    assert np.array_equal(*found)
