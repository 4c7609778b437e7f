"""`python -m benchmarks.cache.kv_disk_decode MODEL`: the cost of writing while a model decodes.

Two servers differ by a fifth for reasons of their own, such as where their memory lies. So there is
one engine in one process. Its lower store is taken out and put back while a few sequences decode. A
window is so many steps that each sequence fills a page, which is copied, checked and written.

A round has six windows: with, without, control, control, without, with. So a drift of the machine's
speed and of the contexts' length cancels. `control` is one more `without`: its ratio is what the
method shows of no cost at all. Each ratio is of one round. The interval holds the median of all
rounds with 95 %, by order statistics.

Clocks follow whatever else runs on the machine. So there is also the processor time of the thread
that computes, with its copies of pages, and that of the thread that writes. And as pages are full
at the same steps of every window, each step's median over all windows is known, too. The last row
has their sums, which other work moves least, and an interval from rounds drawn again. It does not
see what is rare: a stall after one page in ten is in the first row only.
"""

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.request import Request, SamplingParams

_PAGE = 64
_PROMPT = 96  # tokens of the first sequence; each further one has a few more
_LONGER = 7
_WARM_STEPS = 8  # in which the pages of prompts are copied
_FIRST_ID, _LAST_ID = 16, 2000  # below the special tokens of most models
_SEED = 11
_ROUNDS_OF_ANSWER = 2  # that the same sequences decode
_ROUND = ("with", "without", "control", "control", "without", "with")
_WRITER = "kv-disk-writer"
_SAMPLES = 400

Steps = NDArray[np.float64]  # [rounds, windows, steps of a page]


class Window(NamedTuple):
    """The costs of some windows of decoding."""

    seconds: float
    thread_s: float  # processor time of the thread that computes
    writer_s: float  # and of the one that writes
    num_written: int  # pages
    steps_s: tuple[float, ...]  # of each step


class _Written(Observer):
    """Counts pages."""

    def __init__(self) -> None:
        self.num = self.num_dropped = 0

    def pages_stored(self, counts: StoreCounts) -> None:
        """Add a report."""
        self.num += counts.pages["written"]
        self.num_dropped += counts.pages["dropped"]


class Decoding:
    """An engine whose lower store can be taken out, stepped by this thread."""

    def __init__(self, model: Path, folder: Path, num_seqs: int) -> None:
        """Load a model, and open the folder."""
        checkpoint = load_checkpoint(model, device="cpu")
        self._num_new = _ROUNDS_OF_ANSWER * len(_ROUND) * _PAGE + _WARM_STEPS + 2
        most = _PROMPT + num_seqs * _LONGER + self._num_new
        room = -(-most // _PAGE) * _PAGE
        config = EngineConfig(
            kv_cache_tokens=2 * num_seqs * room, max_model_len=room, page_size=_PAGE,
            max_num_seqs=num_seqs, max_draft_tokens=0, kv_disk=folder, kv_disk_gib=16.0,
        )  # fmt: skip
        self._deployment = make_deployment("m", checkpoint.native, DeploymentOptions())
        self._tokenizer = checkpoint.tokenizer
        self._num_seqs = num_seqs
        self.written = _Written()
        engine: Any = build_engine(checkpoint, config, self.written)
        self._core: Any = engine._core  # noqa: SLF001  # its steps are timed one by one
        self._lower_store: Any = self._core._lower_store  # noqa: SLF001
        self._core.start_lower_store(lambda: None)
        while self._lower_store._writer.store is None:  # noqa: SLF001  # it hashes the weights
            time.sleep(0.01)
        self.page_bytes: int = self._lower_store._writer.store.form.file_bytes  # noqa: SLF001

    def begin(self, name: str) -> None:
        """Begin answers to prompts that follow the name, in place of those so far."""
        core = self._core
        for each in self._running:
            core.abort(each.request.request_id)
        self._add(name)
        while core.scheduler.waiting or not all(each.is_decoding for each in self._running):
            core.step()
        for _ in range(_WARM_STEPS):
            core.step()

    def end(self) -> None:
        """End the threads of the store."""
        self._lower_store.close(5.0)

    def window(self, *, has_store: bool) -> Window:
        """Decode a page of each sequence."""
        core = self._core
        store = self._lower_store if has_store else None
        core._lower_store = core.scheduler.pages.lower_store = store  # noqa: SLF001
        self._wait_for_writer()
        num_before, writer_before = self.written.num, _thread_s(_thread_id(_WRITER))
        began_thread, times = time.thread_time(), [time.perf_counter()]
        for _ in range(_PAGE):
            num_done = core.step()
            assert num_done == self._num_seqs, "a step without some of the sequences"
            times.append(time.perf_counter())
        thread_s = time.thread_time() - began_thread
        self._wait_for_writer()
        writer_s = _thread_s(_thread_id(_WRITER)) - writer_before
        num_written = self.written.num - num_before
        steps_s = tuple(end - begin for begin, end in pairwise(times))
        return Window(sum(steps_s), thread_s, writer_s, num_written, steps_s)

    @property
    def _running(self) -> list[Any]:
        return list(self._core.scheduler.running)

    def _add(self, name: str) -> None:
        draw = random.Random(f"{_SEED} {name}")  # noqa: S311
        sampling = SamplingParams(max_tokens=self._num_new, temperature=0.0, ignore_eos=True)
        for number in range(self._num_seqs):
            length = _PROMPT + _LONGER * number
            prompt = tuple(draw.choices(range(_FIRST_ID, _LAST_ID), k=length))
            tier_choice = self._deployment.choose(RopeRequest(), length, self._num_new)
            request = Request(f"{name} {number}", prompt, sampling, tier_choice)
            self._core.add(RequestState.of(request, self._tokenizer, frozenset(), _ignore))

    def _wait_for_writer(self) -> None:
        self._lower_store._writer.delete([])  # noqa: SLF001  # taken when all before it is done
        while not self._lower_store._writer._queue.empty():  # noqa: SLF001
            time.sleep(0.005)
        self._core._step_lower_store()  # noqa: SLF001  # adds up what has been written


def _ignore(_: object) -> None:
    """Take an output."""


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--core", type=int, help="of the threads that compute; default: any")
    parser.add_argument("--writer-core", type=int, help="of the thread that writes; default: any")
    parser.add_argument("--sequences", type=int, default=1, help="decoded at once")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parsed = parser.parse_args()
    if parsed.rounds < 6:
        parser.error("--rounds must be at least 6, for an interval with 95 %")
    torch.set_num_threads(parsed.threads)
    if parsed.core is not None:
        os.sched_setaffinity(0, {parsed.core})
    with tempfile.TemporaryDirectory(dir=parsed.folder) as name:
        decoding = Decoding(parsed.model, Path(name) / "kv", parsed.sequences)
        if parsed.writer_core is not None:
            os.sched_setaffinity(_thread_id(_WRITER), {parsed.writer_core})
        decoding.begin("warm")  # compilations, first touches of memory
        for _ in range(_ROUNDS_OF_ANSWER):
            measure(decoding)
        rounds = []
        for number in range(parsed.rounds):
            if number % _ROUNDS_OF_ANSWER == 0:
                decoding.begin(f"round {number}")
            rounds.append(measure(decoding))
        decoding.end()
        if decoding.written.num_dropped:
            sys.exit(f"{decoding.written.num_dropped} pages were dropped")
        num_tokens = parsed.sequences * _PAGE * _ROUND.count("with")
        for line in report(rounds, num_tokens, decoding.page_bytes):
            sys.stdout.write(line + "\n")


def measure(decoding: Decoding) -> dict[str, Window]:
    """Return the sums of each way's windows in one round."""
    found: dict[str, list[Window]] = {}
    for way in _ROUND:
        found.setdefault(way, []).append(decoding.window(has_store=way == "with"))
    return {way: _sum(each) for way, each in found.items()}


def _sum(windows: Sequence[Window]) -> Window:
    """Return the sums of windows, with all of their steps."""
    seconds, thread_s, writer_s, num_written, steps_s = zip(*windows, strict=True)
    steps = tuple(each for one in steps_s for each in one)
    return Window(sum(seconds), sum(thread_s), sum(writer_s), sum(num_written), steps)


def report(rounds: Sequence[dict[str, Window]], num_tokens: int, page_bytes: int) -> list[str]:
    """Return the lines of the tables; `num_tokens`: of one way in a round."""
    lines = [
        f"| {len(rounds)} rounds of {num_tokens:,} tokens each | without | with "
        "| with / without: median, interval | control / without |",
        "|---|---:|---:|---|---|",
    ]
    for title in ("tokens/s", "processor time of a token, ms"):
        values = {
            way: [
                num_tokens / each[way].seconds
                if title == "tokens/s"
                else 1e3 * each[way].thread_s / num_tokens
                for each in rounds
            ]
            for way in _ROUND
        }
        ratios = [_interval(values[way], values["without"]) for way in ("with", "control")]
        middle = [f"{statistics.median(values[way]):.2f}" for way in ("without", "with")]
        lines.append(f"| {' | '.join([title, *middle, *ratios])} |")
    steps = {
        way: np.array([each[way].steps_s for each in rounds]).reshape(len(rounds), -1, _PAGE)
        for way in _ROUND
    }
    off_s, on_s = (_step_sum(steps[way]) for way in ("without", "with"))
    tokens = num_tokens / _ROUND.count("with")
    ratios = [_ratio_of_steps(steps["without"], steps[way]) for way in ("with", "control")]
    cells = ["tokens/s, by the medians of steps", f"{tokens / off_s:.2f}", f"{tokens / on_s:.2f}"]
    lines.append(f"| {' | '.join([*cells, *ratios])} |")
    on = _sum([each["with"] for each in rounds])
    rate = on.num_written * page_bytes / on.seconds / 1e6
    each_ms = 1e3 * on.writer_s / max(1, on.num_written)
    lines += [
        "",
        f"{on.num_written} pages of {page_bytes / 1e6:.2f} MB were written, {rate:.1f} MB/s. "
        f"The writer took {each_ms:.2f} ms of a processor for each.",
    ]
    return lines


def _step_sum(steps_s: Steps) -> float:
    """Return the seconds of a window whose steps take their medians."""
    return float(np.median(steps_s.reshape(-1, _PAGE), axis=0).sum())


def _ratio_of_steps(off_s: Steps, on_s: Steps) -> str:
    """Return the ratio of the rates by the medians of steps, and where 95 % of samples have it."""
    draw = np.random.default_rng(_SEED)
    samples = [draw.integers(0, len(on_s), len(on_s)) for _ in range(_SAMPLES)]
    found = [_step_sum(off_s[each]) / _step_sum(on_s[each]) for each in samples]
    low, high = np.quantile(found, [0.025, 0.975])
    return f"{_step_sum(off_s) / _step_sum(on_s):.4f}, {low:.4f} to {high:.4f}"


def _interval(mine: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios in pairs, and an interval that holds it with 95 %."""
    ratios = sorted(one / other for one, other in zip(mine, others, strict=True))
    low = interval_rank(len(ratios))
    ends = f"{ratios[low]:.4f} to {ratios[-1 - low]:.4f}"
    return f"{statistics.median(ratios):.4f}, {ends}"


def interval_rank(num: int) -> int:
    """Return the place from each end, among sorted values, between which their median lies.

    The chance that it lies outside is 5 % at most: a value is below the median as a coin falls.
    """
    outside, rank = 0.0, 0
    while (outside := outside + math.comb(num, rank) / 2**num) <= 0.025:
        rank += 1
    return rank - 1


def _thread_id(name: str) -> int:
    (found,) = [each.native_id for each in threading.enumerate() if each.name == name]
    assert found is not None
    return found


def _thread_s(thread: int) -> float:
    """Return the seconds that a thread of this process has computed. On Linux."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
