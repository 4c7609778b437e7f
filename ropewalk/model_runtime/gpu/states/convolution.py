"""Causal convolutions over the last inputs of each sequence in a flat row, on a GPU.

A sequence's tokens follow each other in the row, whatever its parts. So an output reads the row,
and the first outputs also the slot that was there before. A second kernel then writes the last
inputs of every part. The parts of a sequence are in one program, because a part may read what the
one before it wrote.

Shapes: T = flat tokens, C = channels, W = taps, L = W - 1 inputs that a slot keeps, N = slots,
X = parts, S = sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.state_store import DeviceParts
from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import padded

_TOKENS = 16  # that a program holds at once
# Tokens of a program if a sequence has more than that. A step has as many programs for each of its
# sequences as its longest one needs, and with long shares few of them are for nothing.
_SHARE = 128
_CHANNELS = 128


@jit("begin_X", "end_X", "read_X", "first_S1", "gate_t", "num_own")
def _convolve(
    x, taps, tails, bias, gate, begin_X, end_X, read_X, first_S1, out, gate_t, num_own,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Some channels of `num_own` tokens of one sequence.

    GATED: gate * (sum + bias) in the output's type; otherwise silu of the sum.
    """
    first = tl.load(first_S1 + tl.program_id(0))
    last = tl.load(first_S1 + tl.program_id(0) + 1) - 1
    begin, end = tl.load(begin_X + first), tl.load(end_X + last)
    read = tl.load(read_X + first)
    own = begin + tl.program_id(1) * num_own
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    for start in range(own, tl.minimum(own + num_own, end), TOKENS):
        t = start + tl.arange(0, TOKENS)
        is_there = (t < end)[:, None] & is_channel[None, :]
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(KEPT + 1):
            at = t - KEPT + tap
            is_kept = (at < begin)[:, None]
            place = x + at[:, None] * CHANNELS + c[None, :]
            now = tl.load(place, mask=is_there & ~is_kept, other=0.0)
            place = tails + (read * KEPT + KEPT + at - begin)[:, None] * CHANNELS + c[None, :]
            before = tl.load(place, mask=is_there & is_kept & (read >= 0), other=0.0)
            weight = tl.load(taps + tap * CHANNELS + c, mask=is_channel, other=0.0)
            total += weight[None, :] * (now.to(tl.float32) + before)
        if GATED:
            total += tl.load(bias + c, mask=is_channel, other=0.0)[None, :]
            factor = tl.load(gate + t[:, None] * gate_t + c[None, :], mask=is_there, other=0.0)
            total *= factor.to(tl.float32)
        else:
            total *= tl.sigmoid(total)
        place = out + t[:, None] * CHANNELS + c[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=is_there)


@jit("begin_X", "end_X", "read_X", "write_X", "first_S1")
def _keep(
    x, tails, begin_X, end_X, read_X, write_X, first_S1,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, KEPT_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of one sequence: the last inputs of each of its parts go to the part's slot."""
    first = tl.load(first_S1 + tl.program_id(0))
    stop = tl.load(first_S1 + tl.program_id(0) + 1)
    place = tl.arange(0, KEPT_2)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_number = (place < KEPT) & (c < CHANNELS)
    for part in range(first, stop):
        begin, end = tl.load(begin_X + part), tl.load(end_X + part)
        read, write = tl.load(read_X + part), tl.load(write_X + part)
        at = end - KEPT + place
        is_kept = at < begin
        now = tl.load(x + at * CHANNELS + c, mask=is_number & ~is_kept, other=0.0)
        before = tl.load(
            tails + (read * KEPT + KEPT + at - begin) * CHANNELS + c,
            mask=is_number & is_kept & (read >= 0), other=0.0,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read the slot, which may be the one to write
        tl.store(
            tails + (write * KEPT + place) * CHANNELS + c, now.to(tl.float32) + before,
            mask=is_number & (write >= 0),
        )  # fmt: skip
        tl.debug_barrier()  # the next part may read it by other threads


def convolve(
    x_TC: Tensor,
    taps_WC: Tensor,
    tail_NLC: Tensor,
    parts: DeviceParts,
    out_TC: Tensor,
    gate: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the convolution of all sequences to `out_TC`, then their last inputs to their slots.

    `x_TC` and `out_TC` are contiguous. `gate`: a bias [C] in float32 and factors [T, C], whose
    channels are neighbours, for gate * (sum + bias); None: silu of the sum.
    """
    num_channels = x_TC.shape[1]
    kept = len(taps_WC) - 1
    bias_C, gate_TC = (taps_WC, out_TC) if gate is None else gate
    blocks = triton.cdiv(num_channels, _CHANNELS)
    num_own = _TOKENS if parts.most_tokens <= _TOKENS else _SHARE
    grid = parts.num_sequences, triton.cdiv(parts.most_tokens, num_own), blocks
    _convolve[grid](
        x_TC, taps_WC, tail_NLC, bias_C, gate_TC,
        parts.begin_X, parts.end_X, parts.read_X, parts.first_S1, out_TC, gate_TC.stride(0),
        num_own,
        CHANNELS=num_channels, KEPT=kept, TOKENS=_TOKENS, BLOCK=_CHANNELS, GATED=gate is not None,
    )  # fmt: skip
    _keep[parts.num_sequences, blocks](
        x_TC, tail_NLC, parts.begin_X, parts.end_X, parts.read_X, parts.write_X, parts.first_S1,
        CHANNELS=num_channels, KEPT=kept, KEPT_2=padded(kept, 1), BLOCK=_CHANNELS,
    )  # fmt: skip


def new_rows(like_TX: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a row of each token."""
    return torch.empty(len(like_TX), num_columns, dtype=dtype, device=like_TX.device)
