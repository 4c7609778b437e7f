"""A step that the device computes while the host works on another one.

Its tokens stay on the device, where the next step can read them before the host does. A copy of
them for the host is queued behind the step, with an event that the host can wait for.

Shapes: S = sequences of the step that have a new token, U = those that the next step decodes, A =
2 S numbers of the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.runner.sampler import split_told
from ropewalk.model_runtime.transfer import on_device

_NUM_BUFFERS = 3  # at most two launched steps are not read yet
_LEAST_NUMBERS = 512  # of a buffer: 256 sequences


class HostBuffers:
    """Pinned memory for the tokens of launched steps, used in turn.

    None is freed before its owner is. To free pinned memory, torch asks the device, and on a broken
    device that may end the process.
    """

    def __init__(self) -> None:
        """Keep no memory until a step needs it."""
        self._buffers: list[list[Tensor]] = [[] for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def take(self, num: int, dtype: torch.dtype) -> Tensor:
        """Return `num` numbers of pinned memory, valid until it is taken three more times."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        grown = self._buffers[self._turn]
        if not grown or len(grown[-1]) < num:
            size = max(_LEAST_NUMBERS, 1 << (num - 1).bit_length())
            grown.append(torch.empty(size, dtype=dtype, pin_memory=True))
        return grown[-1][:num]


class LaunchedStep:
    """The tokens of a launched step, one for each of its rows of logits."""

    def __init__(self, told_A: Tensor, buffers: HostBuffers) -> None:
        """Queue the copy for the host. `told_A`: what `sampled_on_device` returns, [2 S]."""
        self._num_rows = len(told_A) // 2
        self._token_S = told_A[self._num_rows :]
        self._done: torch.cuda.Event | None = None
        if not told_A.is_cuda:  # the device has run the step already
            self._told_A = told_A.clone()  # the next captured draw has the same place
            return
        # Not the memory of the step before, which may be unread when this one ends.
        self._told_A = buffers.take(len(told_A), told_A.dtype)
        self._told_A.copy_(told_A, non_blocking=True)
        self._done = torch.cuda.current_stream(told_A.device).record_event()

    def tokens_at(self, rows: Sequence[int]) -> Tensor:
        """Return the tokens of some rows on the device, int64 [U], without a wait for it."""
        if list(rows) == list(range(self._num_rows)):
            return self._token_S
        return self._token_S[on_device(np.array(rows, dtype=np.int64), self._token_S.device)]

    def read(self) -> tuple[list[bool], list[int]]:
        """Wait for the step; return whether each row's logits are finite, and its token id."""
        if self._done is not None:
            self._done.synchronize()
        return split_told(self._told_A.tolist(), self._num_rows)
