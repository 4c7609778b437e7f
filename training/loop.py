"""The training loop, with measurements on held-out windows and stored progress."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from training.induction import plant_induction
from training.network import Network
from training.optimizer import Optimizer
from training.pieces import WEIGHT_OF_KIND, Kind
from training.run_folder import Measured, RunFolder
from training.shape import Schedule, Shape
from training.text import Corpus
from training.windows import EARLY, LATE, MIDDLE, POLISH, Batch, Mix, Windows

_MEASURE_EVERY = 100  # steps
_FORMED_BELOW = 0.5  # nats; retrieval counts as formed if the answers' loss is lower
_HELD_OUT_WINDOWS = 64  # per kind
_SMOOTH = 0.95  # weight of the past in the moving average
_ONLY_TEXT = Mix(needles=0, chat=0, dense=0, repeats=0)
_ONLY_NEEDLES = Mix(needles=1, chat=0, dense=0, repeats=0)

Losses = Callable[[Tensor, Tensor], Tensor]


class Training:
    """One run, which is new or resumes from its folder."""

    def __init__(
        self,
        windows: Windows,
        held_out: Windows,
        shape: Shape,
        schedule: Schedule,
        folder: RunFolder,
        *,
        compiled: bool,
    ) -> None:
        torch.manual_seed(schedule.seed)
        self.network = Network(shape)
        if schedule.planted:
            plant_induction(self.network, schedule.seed)
        self._optimizer = Optimizer(self.network, schedule)
        self._schedule, self._folder = schedule, folder
        self.progress = folder.restore(self.network, self._optimizer)
        self._windows = windows
        self._losses: Losses = torch.compile(self.network) if compiled else self.network
        self._means = _Means()
        half = _HELD_OUT_WINDOWS // 2
        self._held_out = {
            Kind.TEXT: [held_out.batch(at, half, _ONLY_TEXT) for at in (0, 1)],
            Kind.ANSWER: [held_out.batch(at, half, _ONLY_NEEDLES) for at in (2, 3)],
        }

    def steps(self) -> Iterator[Measured | None]:
        """Run the steps that are left; yield each step's measurement, or None if it has none."""
        while self.progress.step < self._schedule.all_steps:
            began = time.monotonic()
            self._step()
            is_last = self.progress.step == self._schedule.all_steps
            measured = None
            if self.progress.step % _MEASURE_EVERY == 0 or is_last:
                measured = self._measure()
            self.progress.seconds += time.monotonic() - began
            if measured is not None:
                measured = replace(measured, seconds=self.progress.seconds)
                self.progress.history.append(measured)
                self._folder.save(self.network, self._optimizer, self.progress)
            yield measured

    def _step(self) -> None:
        progress, schedule = self.progress, self._schedule
        batch = self._windows.batch(progress.step, schedule.windows_per_step, self._mix())
        tokens, kinds = torch.from_numpy(batch.tokens), torch.from_numpy(batch.kinds)[:, 1:]
        losses = self._losses(tokens[:, :-1], tokens[:, 1:])
        weights = torch.tensor(WEIGHT_OF_KIND)[kinds]
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(schedule.rate(progress.step))
        self._means.add(losses.detach(), kinds)
        progress.step += 1
        if progress.formed_at is None and self._means.smooth_answer < _FORMED_BELOW:
            progress.formed_at = progress.step

    def _mix(self) -> Mix:
        if self.progress.step >= self._schedule.steps:
            return POLISH
        if self.progress.step >= self._schedule.late_from * self._schedule.steps:
            return LATE
        return EARLY if self.progress.formed_at is None else MIDDLE

    def _measure(self) -> Measured:
        text, answer, repeat = self._means.take()
        step = self.progress.step
        return Measured(
            step=step,
            num_tokens=step * self._schedule.windows_per_step * self.network.shape.native_len,
            seconds=0.0,
            text=text,
            answer=answer,
            repeat=repeat,
            held_out=self._held_out_loss(Kind.TEXT),
            held_out_answer=self._held_out_loss(Kind.ANSWER),
        )

    @torch.no_grad()
    def _held_out_loss(self, kind: Kind) -> float:
        sums, count = 0.0, 0
        for batch in self._held_out[kind]:
            losses, kinds = self._losses_of(batch)
            sums += float(losses[kinds == kind].sum())
            count += int((kinds == kind).sum())
        return sums / count

    def _losses_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(batch.tokens)
        return (
            self._losses(tokens[:, :-1], tokens[:, 1:]),
            torch.from_numpy(batch.kinds)[:, 1:],
        )


class _Means:
    """Mean losses by kind since the last `take`, and a moving average of the answers' loss."""

    def __init__(self) -> None:
        self.smooth_answer = math.inf
        self._sums: dict[Kind, list[float]] = {}

    def add(self, losses: Tensor, kinds: Tensor) -> None:
        for kind in (Kind.TEXT, Kind.ANSWER, Kind.REPEAT):
            chosen = losses[kinds == kind]
            if not len(chosen):
                continue
            mean = float(chosen.mean())
            self._sums.setdefault(kind, []).append(mean)
            if kind is Kind.ANSWER:
                old = mean if math.isinf(self.smooth_answer) else self.smooth_answer
                self.smooth_answer = _SMOOTH * old + (1 - _SMOOTH) * mean

    def take(self) -> list[float]:
        """Return and clear the means of text, answer and repeat; NaN if a kind had no token."""
        means = [
            sum(self._sums[kind]) / len(self._sums[kind]) if kind in self._sums else math.nan
            for kind in (Kind.TEXT, Kind.ANSWER, Kind.REPEAT)
        ]
        self._sums.clear()
        return means


def open_training(
    corpus: Corpus, shape: Shape, schedule: Schedule, folder: RunFolder, *, compiled: bool
) -> Training:
    """Open a run over a corpus.

    The held-out windows come from the held-out files and do not depend on the schedule's seed.
    """
    windows = Windows(
        corpus.tokenizer, corpus.library, corpus.tests, shape.native_len, schedule.seed
    )
    held_out = Windows(corpus.tokenizer, corpus.held_out, [], shape.native_len, 0)
    return Training(windows, held_out, shape, schedule, folder, compiled=compiled)
