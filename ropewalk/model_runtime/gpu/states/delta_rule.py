"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) on a GPU, token after token.

A program holds some columns of one head's state in registers, over all tokens of a sequence. So the
state is read and written once for each part, and prompts and decodes have one order of sums. Sums
over a state's rows are within a warp, in the order that Triton chooses.

Shapes: T = flat tokens, C = channels of the convolution: queries, keys and values, head beside
head; H = value heads, K = dimensions of a key, D = dimensions of a value, N = slots.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.state_store import DeviceParts
from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import padded

_L2_EPS = tl.constexpr(1e-6)  # as in the published kernels
_COLUMNS = 8  # of a state in a program: 128 x 8 numbers are 32 registers of each thread


@jit
def _softplus(x):
    """Return log(1 + exp(x)), which is exp(x) where that is far below one."""
    more = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + more
    # The sum's rounding is in both, so the quotient is without it (Kahan's log1p).
    rounded = tl.where(whole == 1.0, 1.0, whole - 1.0)
    small = tl.where(whole == 1.0, more, tl.log(whole) * (more / rounded))
    return tl.where(x > 20.0, x, small)


@jit("begin_X", "end_X", "read_X", "write_X", "first_S1")
def _delta(
    mixed, betas, steps, rates, step_biases, states,
    begin_X, end_X, read_X, write_X, first_S1, out,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr, KEYS_2: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """Some columns of one head of a sequence. Its parts follow each other, in one state."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(first_S1 + sequence), tl.load(first_S1 + sequence + 1)
    k = tl.arange(0, KEYS_2)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = k < KEYS, v < VALUES
    is_number = is_key[:, None] & is_value[None, :]
    numbers = k[:, None] * VALUES + v[None, :]
    read = tl.load(read_X + first)
    place = states + (read * HEADS + head) * KEYS * VALUES
    state = tl.load(place + numbers, mask=is_number & (read >= 0), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(step_biases + head)
    query_at = head // (HEADS // KEY_HEADS) * KEYS
    key_at, value_at = KEY_HEADS * KEYS + query_at, 2 * KEY_HEADS * KEYS + head * VALUES
    for part in range(first, stop):
        begin, end, write = tl.load(begin_X + part), tl.load(end_X + part), tl.load(write_X + part)
        for t in range(begin, end):
            row = mixed + t * CHANNELS
            query = tl.load(row + query_at + k, mask=is_key, other=0.0)
            key = tl.load(row + key_at + k, mask=is_key, other=0.0)
            value = tl.load(row + value_at + v, mask=is_value, other=0.0)
            query *= SCALE / tl.sqrt(tl.sum(query * query, 0) + _L2_EPS)
            key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + _L2_EPS)
            step = tl.load(steps + t * HEADS + head).to(tl.float32) + bias
            strength = tl.sigmoid(tl.load(betas + t * HEADS + head).to(tl.float32))
            state *= tl.exp(rate * _softplus(step))
            change = (value - tl.sum(state * key[:, None], 0)) * strength
            state += key[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], 0)
            tl.store(out + (t * HEADS + head) * VALUES + v, result, mask=is_value)
        place = states + (write * HEADS + head) * KEYS * VALUES
        tl.store(place + numbers, state, mask=is_number & (write >= 0))


@jit
def _norm_and_gate(
    x, gate, norm, out, eps,
    HEADS: tl.constexpr, VALUES: tl.constexpr, VALUES_2: tl.constexpr,
):  # fmt: skip
    """One head of a token: RMSNorm(x) * norm * silu(gate), rounded once."""
    d = tl.arange(0, VALUES_2)
    is_value = d < VALUES
    at = (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * VALUES + d
    values = tl.load(x + at, mask=is_value, other=0.0)
    values *= 1.0 / tl.sqrt(tl.sum(values * values, 0) / VALUES + eps)
    values *= tl.load(norm + d, mask=is_value, other=0.0)
    opening = tl.load(gate + at, mask=is_value, other=0.0).to(tl.float32)
    values *= opening * tl.sigmoid(opening)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=is_value)


def delta_rule(
    mixed_TC: Tensor,
    beta_TH: Tensor,
    step_TH: Tensor,
    rates: tuple[Tensor, Tensor],
    state_NHKD: Tensor,
    parts: DeviceParts,
    num_key_heads: int,
    out_TV: Tensor,
) -> None:
    """Advance the states of all sequences, and write their outputs to `out_TV` in float32.

    `rates`: the logs of decays for a step of one, and the biases of steps, [H] in float32.
    """
    _, num_heads, key_dim, dim = state_NHKD.shape
    block = min(_COLUMNS, padded(dim, 1))
    _delta[parts.num_sequences, num_heads, triton.cdiv(dim, block)](
        mixed_TC, beta_TH, step_TH, *rates, state_NHKD,
        parts.begin_X, parts.end_X, parts.read_X, parts.write_X, parts.first_S1, out_TV,
        CHANNELS=mixed_TC.shape[1], HEADS=num_heads, KEY_HEADS=num_key_heads,
        KEYS=key_dim, KEYS_2=padded(key_dim), VALUES=dim, BLOCK=block,
        SCALE=1.0 / math.sqrt(key_dim), num_warps=1,
    )  # fmt: skip


def norm_and_gate(
    x_TV: Tensor, gate_TV: Tensor, norm_D: Tensor, eps: float, out_TV: Tensor
) -> None:
    """Write RMSNorm(x) * norm * silu(gate) of each head to `out_TV`, in its number type."""
    num_tokens, width = x_TV.shape
    dim = len(norm_D)
    if num_tokens:
        _norm_and_gate[num_tokens, width // dim](
            x_TV, gate_TV, norm_D, out_TV, eps,
            HEADS=width // dim, VALUES=dim, VALUES_2=padded(dim), num_warps=1,
        )  # fmt: skip
