"""The memory of a server under load, over time, and its trend."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from tests.server.test_metrics import samples
from tests.servers.processes import Server, num_descriptors, rss_mib
from tests.servers.progress import say

_EVERY_S, _SAY_EVERY = 1.0, 10


@dataclass(frozen=True, slots=True)
class Moment:
    """The figures of one moment."""

    rss_mib: float
    generated_tokens: float  # so far


class Watch:
    """A thread that takes the figures every second until the block ends."""

    def __init__(self, server: Server) -> None:
        self.moments: list[Moment] = []
        self._server = server
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
            num_tokens = samples(self._server)["ropewalk_generated_tokens_total", ()]
            self.moments.append(Moment(rss_mib(self._server.pid), num_tokens))
            if len(self.moments) % _SAY_EVERY == 0:
                say(str(self.moments[-1]))


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
