"""Draws from the logits of captured steps, captured like the steps themselves.

A draw is up to 29 launches, and a replay is one. The numbers of each row are at a fixed address, so
any mixture of greedy rows and rows with cut tails replays the same draw. Importing this file
imports triton.

Shapes: R = rows, V = vocabulary, C = numbers that a row is drawn with.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.gpu.sampling.draw_ranked import CUTS, draw_rows
from ropewalk.model_runtime.runner.cuda_graphs import Recorder, captured
from ropewalk.model_runtime.runner.sampler import SamplingRow, draw_cuts
from ropewalk.model_runtime.transfer import fill


class CapturedDraws:
    """The captured draws by their numbers of rows. Not thread-safe."""

    def __init__(self, logits_RV: Tensor, sizes: Sequence[int], record: Recorder) -> None:
        """Capture a draw of each size, ascending. Raises RecordingError or OutOfMemoryError.

        `logits_RV`: where captured steps write their logits, float32. A draw overwrites them.
        """
        self._logits_RV = logits_RV
        self._cuts_RC = torch.zeros(
            len(logits_RV), CUTS, dtype=torch.float64, device=logits_RV.device
        )
        self._sizes = sizes
        self._recorded: dict[int, tuple[Tensor, Callable[[], None]]] = {}
        for size in reversed(sizes):
            self._recorded[size] = captured(record, partial(self._drawn, size))

    def _drawn(self, size: int) -> Tensor:
        logits_RV = self._logits_RV[:size]
        return draw_rows(logits_RV, self._cuts_RC[:size], logits_RV, (True, True, True))

    @torch.inference_mode()
    def draw(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor | None:
        """Return what `sampled_on_device` does, valid until the next draw; None if it has to do it.

        That is so for logits of a step that was not captured, and for rows that change them first.
        """
        if logits_RV.data_ptr() != self._logits_RV.data_ptr() or not rows:
            return None
        if any(row.changes_logits for row in rows):
            return None
        num_rows = len(rows)
        size = next(size for size in self._sizes if size >= num_rows)
        cuts_RC = np.zeros((size, CUTS))
        cuts_RC[:num_rows] = draw_cuts(rows)
        fill(self._cuts_RC[:size], cuts_RC)
        told_A, replay = self._recorded[size]
        replay()
        if num_rows == size:
            return told_A
        return torch.cat((told_A[:num_rows], told_A[size : size + num_rows]))
