"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), token after token.

A head's state S has a row for each dimension of a key and a column for each dimension of a value.
For each token, S becomes S * decay + k (v - k S')^T * beta, where S' is the decayed state, and the
output is q S. Lanes are columns of the state, and sums over its rows are in their order. So no sum
crosses lanes, and the bits of a token depend neither on chunks, nor on other sequences, nor on
threads. Prompts are computed in the same order as decodes. In chunks they would take more products
on a CPU, where nothing computes a product of small matrices faster than these loops.

Shapes: T = flat tokens, C = channels of the convolution: queries, keys and values, head beside
head; V = value heads beside each other, Y = columns of a row, H = value heads, X = segments,
N = slots, K = dimensions of a key, D = dimensions of a value, W = taps, L = inputs that a slot
keeps.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.activations import silu
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    broadcast,
    fma,
    load,
    multiply,
    reduce_add,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.states.convolution import (
    Segments,
    convolve,
    keep_inputs,
)

_L2_EPS = np.float32(1e-6)  # as in the published kernels
_BLOCK = 64  # tokens whose inputs stay in the second cache while a head is advanced


class DeltaWeights(NamedTuple):
    """The weights of one layer that are not products."""

    taps_WC: Floats
    rate_H: NDArray[np.float64]  # -exp(A_log): the log of a decay, for a step of one
    step_bias_H: NDArray[np.float64]
    norm_D: Floats  # multiplies each head's output after its RMSNorm
    eps: np.float32


class DeltaInputs(NamedTuple):
    """The results of a layer's products; `Numbers` have the served number type."""

    x_TY: Numbers  # before the convolution
    x_at: int  # the column of the first channel
    gate_TY: Numbers  # of the output
    gate_at: int
    beta_TH: Floats  # before the sigmoid
    step_TH: Floats  # before bias and softplus


@jit()
def _normalize_rows(rows: Floats, num_rows: int, dim: int, scale: np.float32) -> None:
    """Divide rows of `dim` numbers by their L2 norms in place, and multiply them by `scale`."""
    for row in range(num_rows):
        at = row * dim
        squares = broadcast(np.float32(0.0))
        for d in range(0, dim, WIDTH):
            x = load(rows, at + d)
            squares = fma(x, x, squares)
        factor = broadcast(scale / np.sqrt(reduce_add(squares) + _L2_EPS))
        for d in range(0, dim, WIDTH):
            store(rows, at + d, multiply(load(rows, at + d), factor))


@jit()
def _softplus(x: float) -> float:
    return x if x > 20.0 else math.log1p(math.exp(x))


@jit()
def _four_columns(
    state: Floats,
    source: int,
    target: int,
    shape: tuple[int, int],
    key: Floats,
    key_at: int,
    query: Floats,
    value: Floats,
    value_at: int,
    decay: np.float32,
    beta: np.float32,
    out: Floats,
    out_at: int,
) -> None:
    """Advance four registers of a head's columns by one token, from `source` to `target`."""
    num_rows, stride = shape
    decays = broadcast(decay)
    m0 = m1 = m2 = m3 = broadcast(np.float32(0.0))
    for row in range(num_rows):
        at = source + row * stride
        k = broadcast(key[key_at + row])
        m0 = fma(multiply(load(state, at), decays), k, m0)
        m1 = fma(multiply(load(state, at + WIDTH), decays), k, m1)
        m2 = fma(multiply(load(state, at + 2 * WIDTH), decays), k, m2)
        m3 = fma(multiply(load(state, at + 3 * WIDTH), decays), k, m3)
    betas = broadcast(beta)
    m0 = multiply(subtract(load(value, value_at), m0), betas)
    m1 = multiply(subtract(load(value, value_at + WIDTH), m1), betas)
    m2 = multiply(subtract(load(value, value_at + 2 * WIDTH), m2), betas)
    m3 = multiply(subtract(load(value, value_at + 3 * WIDTH), m3), betas)
    o0 = o1 = o2 = o3 = broadcast(np.float32(0.0))
    for row in range(num_rows):
        at, to = source + row * stride, target + row * stride
        k, q = broadcast(key[key_at + row]), broadcast(query[key_at + row])
        s0 = fma(k, m0, multiply(load(state, at), decays))
        s1 = fma(k, m1, multiply(load(state, at + WIDTH), decays))
        s2 = fma(k, m2, multiply(load(state, at + 2 * WIDTH), decays))
        s3 = fma(k, m3, multiply(load(state, at + 3 * WIDTH), decays))
        store(state, to, s0)
        store(state, to + WIDTH, s1)
        store(state, to + 2 * WIDTH, s2)
        store(state, to + 3 * WIDTH, s3)
        o0, o1 = fma(s0, q, o0), fma(s1, q, o1)
        o2, o3 = fma(s2, q, o2), fma(s3, q, o3)
    store(out, out_at, o0)
    store(out, out_at + WIDTH, o1)
    store(out, out_at + 2 * WIDTH, o2)
    store(out, out_at + 3 * WIDTH, o3)


@jit()
def _one_column(
    state: Floats,
    source: int,
    target: int,
    shape: tuple[int, int],
    key: Floats,
    key_at: int,
    query: Floats,
    value: Floats,
    value_at: int,
    decay: np.float32,
    beta: np.float32,
    out: Floats,
    out_at: int,
) -> None:
    """Advance one register of columns by one token, as `_four_columns` does."""
    num_rows, stride = shape
    decays = broadcast(decay)
    m = broadcast(np.float32(0.0))
    for row in range(num_rows):
        s = multiply(load(state, source + row * stride), decays)
        m = fma(s, broadcast(key[key_at + row]), m)
    m = multiply(subtract(load(value, value_at), m), broadcast(beta))
    o = broadcast(np.float32(0.0))
    for row in range(num_rows):
        s = multiply(load(state, source + row * stride), decays)
        s = fma(broadcast(key[key_at + row]), m, s)
        store(state, target + row * stride, s)
        o = fma(s, broadcast(query[key_at + row]), o)
    store(out, out_at, o)


@jit()
def _advance_head(
    state_NHKD: Floats,
    head: int,
    slots: tuple[int, int],
    key: Floats,
    query: Floats,
    value: Floats,
    value_at: int,
    value_stride: int,
    decay: Floats,
    beta: Floats,
    out: Floats,
) -> None:
    """Advance one head by the tokens of a segment, and write its outputs [tokens, D] to `out`."""
    _, num_heads, num_rows, dim = state_NHKD.shape
    read, write = slots
    size = num_rows * dim
    target = (write * num_heads + head) * size
    if read < 0:
        for at in range(0, size, WIDTH):
            store(state_NHKD, target + at, broadcast(np.float32(0.0)))
    source = target if read < 0 else (read * num_heads + head) * size
    shape = (num_rows, dim)
    in_fours = dim - dim % (4 * WIDTH)
    # A block of columns stays in the first cache for all tokens.
    for d in range(0, in_fours, 4 * WIDTH):
        begin = source + d
        for t in range(decay.shape[0]):
            _four_columns(
                state_NHKD, begin, target + d, shape, key, t * num_rows, query,
                value, value_at + t * value_stride + d, decay[t], beta[t], out, t * dim + d,
            )  # fmt: skip
            begin = target + d
    for d in range(in_fours, dim, WIDTH):
        begin = source + d
        for t in range(decay.shape[0]):
            _one_column(
                state_NHKD, begin, target + d, shape, key, t * num_rows, query,
                value, value_at + t * value_stride + d, decay[t], beta[t], out, t * dim + d,
            )  # fmt: skip
            begin = target + d


@jit()
def _write_gated(
    out: Floats, gate_TY: Numbers, gate_at: int, norm_D: Floats, eps: np.float32, begin: int,
    head: int, num_rows: int, out_TV: Numbers,
) -> None:  # fmt: skip
    """Write RMSNorm(out) * norm * silu(gate) of one head's rows, rounded once."""
    dim = norm_D.shape[0]
    width = out_TV.shape[1]
    for row in range(num_rows):
        squares = broadcast(np.float32(0.0))
        for d in range(0, dim, WIDTH):
            x = load(out, row * dim + d)
            squares = fma(x, x, squares)
        mean = reduce_add(squares) / np.float32(dim)
        factor = broadcast(np.float32(1.0) / np.sqrt(mean + eps))
        at = (begin + row) * width + head * dim
        gate = (begin + row) * gate_TY.shape[1] + gate_at + head * dim
        for d in range(0, dim, WIDTH):
            x = multiply(multiply(load(out, row * dim + d), factor), load(norm_D, d))
            store(out_TV, at + d, multiply(x, silu(load(gate_TY, gate + d))))


@jit(apart=True)
def gated_delta(
    num_key_heads: int,
    segments_X4: Segments,
    inputs: tuple[Numbers, int, Numbers, int, Floats, Floats],
    weights: tuple[Floats, NDArray[np.float64], NDArray[np.float64], Floats, np.float32],
    tail_NLC: Floats,
    state_NHKD: Floats,
    out_TV: Numbers,
    first_key_head: int,
    end_key_head: int,
) -> None:
    """Compute a layer from its products up to its output's norm, for some key heads.

    These are `first_key_head` to `end_key_head` - 1, with the value heads that share them.
    `inputs` and `weights` are `DeltaInputs` and `DeltaWeights` as plain tuples.
    """
    x_TY, x_at, gate_TY, gate_at, beta_TH, step_TH = inputs
    taps_WC, rate_H, step_bias_H, norm_D, eps = weights
    _, num_heads, key_dim, dim = state_NHKD.shape
    group = num_heads // num_key_heads
    scale = np.float32(1.0 / math.sqrt(key_dim))
    for key_head in range(first_key_head, end_key_head):
        query_at = key_head * key_dim
        key_at = num_key_heads * key_dim + query_at
        value_at = 2 * num_key_heads * key_dim + key_head * group * dim
        queries, keys = (query_at, query_at + key_dim), (key_at, key_at + key_dim)
        values = (value_at, value_at + group * dim)
        for number in range(segments_X4.shape[0]):
            first, last = segments_X4[number, 0], segments_X4[number, 1]
            read, write = segments_X4[number, 2], segments_X4[number, 3]
            for begin in range(first, last, _BLOCK):
                part = (begin, min(begin + _BLOCK, last), read, write)
                num_rows = part[1] - begin
                query = np.empty(num_rows * key_dim, np.float32)
                key = np.empty(num_rows * key_dim, np.float32)
                value = np.empty(num_rows * group * dim, np.float32)
                convolve(x_TY, x_at, part, taps_WC, tail_NLC, queries, query, key_dim, True)  # noqa: FBT003
                convolve(x_TY, x_at, part, taps_WC, tail_NLC, keys, key, key_dim, True)  # noqa: FBT003
                convolve(
                    x_TY,
                    x_at,
                    part,
                    taps_WC,
                    tail_NLC,
                    values,
                    value,
                    group * dim,
                    True,  # noqa: FBT003
                )
                for channels in (queries, keys, values):
                    keep_inputs(x_TY, x_at, part, tail_NLC, channels)
                _normalize_rows(query, num_rows, key_dim, scale)
                _normalize_rows(key, num_rows, key_dim, np.float32(1.0))
                decay = np.empty(num_rows, np.float32)
                beta = np.empty(num_rows, np.float32)
                out = np.empty(num_rows * dim, np.float32)
                for place in range(group):
                    head = key_head * group + place
                    for t in range(num_rows):
                        step = np.float64(step_TH[begin + t, head]) + step_bias_H[head]
                        decay[t] = np.float32(math.exp(rate_H[head] * _softplus(step)))
                        strength = np.float64(beta_TH[begin + t, head])
                        beta[t] = np.float32(1.0 / (1.0 + math.exp(-strength)))
                    _advance_head(
                        state_NHKD, head, (read, write), key, query, value, place * dim,
                        group * dim, decay, beta, out,
                    )  # fmt: skip
                    _write_gated(out, gate_TY, gate_at, norm_D, eps, begin, head, num_rows, out_TV)
                read = write
