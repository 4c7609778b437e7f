"""Memory, descriptors and throughput of a server under load, over time, and their trends."""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Self

from tests.server.test_metrics import samples
from tests.servers.processes import Server, num_descriptors, rss_mib
from tests.servers.progress import say

_EVERY_S, _SAY_EVERY = 1.0, 10


@dataclass(frozen=True, slots=True)
class Moment:
    """The figures of one moment."""

    seconds: float  # since the beginning
    rss_mib: float
    num_descriptors: int
    generated_tokens: float  # so far
    running: float
    waiting: float
    kv_usage: float


class Watch:
    """A thread that takes the figures every second until the block ends."""

    def __init__(self, server: Server) -> None:
        self.moments: list[Moment] = []
        self._server = server
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.moments.append(self._look())
            if len(self.moments) % _SAY_EVERY == 0:
                say(self._line(self.moments[-1]))

    def _look(self) -> Moment:
        found = samples(self._server)
        generated, running, waiting, usage = (
            found["ropewalk_" + name, ()]
            for name in (
                *("generated_tokens_total", "requests_running", "requests_waiting"),
                "kv_cache_usage_ratio",
            )
        )
        return Moment(
            time.monotonic() - self._began,
            rss_mib(self._server.pid),
            num_descriptors(self._server.pid),
            generated,
            running,
            waiting,
            usage,
        )

    def _line(self, now: Moment) -> str:
        return (
            f"{now.seconds:6.0f} s  {now.rss_mib:7.1f} MiB  {now.num_descriptors:3d} descriptors  "
            f"{now.generated_tokens:8.0f} tokens  {now.running:2.0f} running  "
            f"{now.waiting:2.0f} waiting  {now.kv_usage:4.0%} of the cache"
        )


@dataclass(frozen=True, slots=True)
class Trend:
    """The rise of a series: Mann-Kendall for whether, Theil-Sen for how much."""

    p_rising: float  # one-sided; small: rises more often than chance would have it
    rise: float  # median slope times duration, in the series' unit

    @classmethod
    def of(cls, values: Sequence[float]) -> "Trend":
        """The trend of values at equal distances; neither test assumes a distribution."""
        count = len(values)
        pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
        score = sum((values[j] > values[i]) - (values[j] < values[i]) for i, j in pairs)
        ties = [values.count(each) for each in set(values)]
        spread = count * (count - 1) * (2 * count + 5) - sum(
            each * (each - 1) * (2 * each + 5) for each in ties
        )
        z = (
            0.0
            if spread == 0 or score == 0
            else (score - math.copysign(1, score)) / math.sqrt(spread / 18)
        )
        slopes = [(values[j] - values[i]) / (j - i) for i, j in pairs]
        return cls(math.erfc(z / math.sqrt(2)) / 2, median(slopes) * (count - 1))


def write(folder: Path, moments: Sequence[Moment], summary: dict[str, object]) -> None:
    """Write soak.json and soak.png."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {**summary, "moments": [asdict(moment) for moment in moments]}
    (folder / "soak.json").write_text(json.dumps(found, indent=1))
    _plot(folder / "soak.png", moments)


def _plot(path: Path, moments: Sequence[Moment]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5))
    above.plot([each.seconds for each in moments], [each.rss_mib for each in moments])
    above.set(ylabel="resident memory, MiB", ylim=(0, None))
    steps = list(pairwise(moments))
    rates = [
        (after.generated_tokens - before.generated_tokens) / (after.seconds - before.seconds)
        for before, after in steps
    ]
    below.plot([after.seconds for _, after in steps], rates)
    below.set(ylabel="tokens per second", xlabel="seconds", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def settle(pid: int) -> None:
    """Wait until a process has closed the connections of clients that have left."""
    seen = [num_descriptors(pid)]
    while len(seen) < 6 or len(set(seen[-6:])) > 1:
        time.sleep(0.05)
        seen.append(num_descriptors(pid))


def wait_for(condition: Callable[[], bool], limit_s: float = 20) -> bool:
    """Wait until a condition holds; returns whether it did in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
