"""A step of decodes that the device computes while the host works on another one.

Its tokens stay on the device, where the next step can read them before the host does. A copy of
them for the host is queued behind the step, with an event that the host can wait for.

Shapes: S = sequences of the step, R = sequences of the step after it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_runtime.runner.sampler import split_told
from model_runtime.transfer import on_device


class LaunchedStep:
    """The tokens of a launched step, one for each sequence."""

    def __init__(self, told_A: Tensor) -> None:
        """Queue the copy for the host. `told_A`: what `sampled_on_device` returns, [2 S]."""
        self._num_rows = len(told_A) // 2
        self._token_S = told_A[self._num_rows :]
        self._done: torch.cuda.Event | None = None
        if not told_A.is_cuda:  # the device has run the step already
            self._told_A = told_A
            return
        # Pinned memory of its own, because a later step may end before this one is read.
        self._told_A = torch.empty(len(told_A), dtype=told_A.dtype, pin_memory=True)
        self._told_A.copy_(told_A, non_blocking=True)
        self._done = torch.cuda.current_stream(told_A.device).record_event()

    def tokens_at(self, rows: Sequence[int]) -> Tensor:
        """Return the tokens of some rows on the device, int64 [R], without a wait for it."""
        if len(rows) == self._num_rows:
            return self._token_S  # rows are in order
        return self._token_S[on_device(np.array(rows, dtype=np.int64), self._token_S.device)]

    def read(self) -> tuple[list[bool], list[int]]:
        """Wait for the step; return whether each row's logits are finite, and its token id."""
        if self._done is not None:
            self._done.synchronize()
        return split_told(self._told_A.tolist(), self._num_rows)
