"""Causal convolutions over the last inputs of each sequence in a flat row.

The lanes of a register are channels, and a channel's sum is over its taps, oldest first. Its bits
therefore depend neither on the other sequences, nor on where a chunk of tokens begins, nor on the
width of a register.

Shapes: T = flat tokens, Y = columns of a row, C = channels, W = taps, X = segments, N = slots,
L = the W - 1 inputs that a slot keeps.
"""

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.activations import silu
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    fma,
    load,
    multiply,
    store,
)

# A row is consecutive tokens of one sequence: their begin and end in the flat row, the slot with
# the state before them (NO_SLOT: zeros), and that for the state after them, maybe the same.
Segments = NDArray[np.int64]  # [X, 4]
NO_SLOT = -1


@jit()
def convolve(
    x_TY: Numbers,
    x_at: int,
    segment: tuple[int, int, int, int],
    taps_WC: Floats,
    tail_NLC: Floats,
    channels: tuple[int, int],
    out: Floats,
    row_stride: int,
    is_gated: bool,  # noqa: FBT001
) -> None:
    """Write the convolution of a segment's channels to `out`, and silu of it if `is_gated`.

    `x_at`: the column of the first channel. `channels`: the first one, and the one after the last;
    a multiple of WIDTH lies between them. Row t of the segment begins at t * row_stride of `out`,
    with the first of these channels.
    """
    begin, end, read, _ = segment
    first, last = channels
    num_taps, num_channels = taps_WC.shape
    stride = x_TY.shape[1]
    num_kept = num_taps - 1
    for row in range(end - begin):
        for channel in range(first, last, WIDTH):
            total = broadcast(np.float32(0.0))
            for tap in range(num_taps):
                at = row - num_kept + tap
                weight = load(taps_WC, tap * num_channels + channel)
                if at >= 0:
                    x = load(x_TY, (begin + at) * stride + x_at + channel)
                    total = fma(weight, x, total)
                elif read >= 0:
                    kept = (read * num_kept + num_kept + at) * num_channels + channel
                    total = fma(weight, load(tail_NLC, kept), total)
            if is_gated:
                total = silu(total)
            store(out, row * row_stride + channel - first, total)


@jit()
def keep_inputs(
    x_TY: Numbers,
    x_at: int,
    segment: tuple[int, int, int, int],
    tail_NLC: Floats,
    channels: tuple[int, int],
) -> None:
    """Write the last inputs of a segment's channels to its slot. `convolve` comes before."""
    begin, end, read, write = segment
    first, last = channels
    _, num_kept, num_channels = tail_NLC.shape
    stride = x_TY.shape[1]
    zero = broadcast(np.float32(0.0))
    for place in range(num_kept):  # ascending, so that a slot may be read and written
        at = end - begin - num_kept + place
        for channel in range(first, last, WIDTH):
            x = zero
            if at >= 0:
                x = load(x_TY, (begin + at) * stride + x_at + channel)
            elif read >= 0:
                x = load(tail_NLC, (read * num_kept + num_kept + at) * num_channels + channel)
            store(tail_NLC, (write * num_kept + place) * num_channels + channel, x)


@jit(apart=True)
def short_convolution(
    joined_TY: Numbers,
    joined_at: int,
    segments_X4: Segments,
    taps_WC: Floats,
    bias_C: Floats,
    tail_NLC: Floats,
    inputs_TC: Numbers,
    out_TC: Numbers,
    first: int,
    last: int,
) -> None:
    """Compute gate * (convolution of (gate * value)) for channels `first` to `last` - 1 of LFM 2.

    `joined_TY`: first gate, second gate and value beside each other, from column `joined_at` on.
    `inputs_TC`: scratch of the served number type, to which the products of first gate and value
    are rounded.
    """
    num_channels = out_TC.shape[1]
    width = joined_TY.shape[1]
    for row in range(out_TC.shape[0]):
        for channel in range(first, last, WIDTH):
            at = row * width + joined_at + channel
            x = multiply(load(joined_TY, at), load(joined_TY, at + 2 * num_channels))
            store(inputs_TC, row * num_channels + channel, x)
    num_columns = last - first
    for number in range(segments_X4.shape[0]):
        segment = (
            segments_X4[number, 0],
            segments_X4[number, 1],
            segments_X4[number, 2],
            segments_X4[number, 3],
        )
        begin, end, _, _ = segment
        total = np.empty((end - begin) * num_columns, np.float32)
        convolve(
            inputs_TC,
            0,
            segment,
            taps_WC,
            tail_NLC,
            (first, last),
            total,
            num_columns,
            False,  # noqa: FBT003
        )
        keep_inputs(inputs_TC, 0, segment, tail_NLC, (first, last))
        for row in range(end - begin):
            for channel in range(first, last, WIDTH):
                sum_ = add(load(total, row * num_columns + channel - first), load(bias_C, channel))
                at = (begin + row) * width + joined_at + num_channels + channel
                gate = load(joined_TY, at)
                store(out_TC, (begin + row) * num_channels + channel, multiply(gate, sum_))
