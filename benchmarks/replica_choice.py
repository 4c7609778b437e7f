"""Compare ways to choose a replica by simulated latencies: python -m benchmarks.replica_choice.

Requests arrive at random times at replicas whose steps take a given time. Three in ten share one
prefix, the others have one of forty. The page memory of the choice is also the cache of a replica.
"""

import argparse
import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ropewalk.server.replicas.choice import DECODE_WEIGHT, ReplicaChoice, Routing
from ropewalk.server.replicas.prompt_pages import PageMemory, PromptPages

PAGE_SIZE, NUM_PREFIXES, NUM_SEEDS = 64, 40, 3
WEIGHTS = (0, 4, 8, 16, DECODE_WEIGHT, 64, 128, 512)


@dataclass(frozen=True, slots=True)
class Machine:
    """The time of a step, and the traffic on all replicas together."""

    name: str
    base_s: float  # of every step
    prompt_token_s: float
    running_s: float  # for each generating request
    step_tokens: int  # of prompts, at most
    requests_a_second: float


MACHINES = (
    Machine("CPU", 0.01, 0.0002, 0.0008, 512, 9),
    Machine("CPU, busy", 0.01, 0.0002, 0.0008, 512, 12),
    Machine("GPU", 0.012, 0.00002, 0.00005, 2048, 60),
    Machine("GPU, busy", 0.012, 0.00004, 0.00005, 2048, 75),
)


@dataclass(slots=True)
class Replica:
    """The work of a replica, prompts in order and answers."""

    cached: PageMemory
    queue: list[list[int]] = field(default_factory=list)  # [request, tokens left]
    left: dict[int, int] = field(default_factory=dict)  # request -> tokens of the answer
    is_stepping: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Means over the requests of a run, and 95th percentiles."""

    first_token_s: float
    first_token_p95_s: float
    whole_s: float
    whole_p95_s: float
    cached_share: float  # of all prompt tokens


class Simulation:
    """One run of requests over replicas."""

    def __init__(self, machine: Machine, choice: ReplicaChoice, num_pages: int, seed: int) -> None:
        self.machine, self.choice = machine, choice
        self.rng = random.Random(seed)  # noqa: S311  # repeatable, not secret
        self.replicas = {f"replica-{at}": Replica(PageMemory(num_pages)) for at in range(4)}
        choice.update(dict.fromkeys(self.replicas, num_pages))
        self.num_cached = self.num_tokens = 0
        self.began: dict[int, float] = {}
        self.first: list[float] = []
        self.whole: list[float] = []
        # (time, order, the replica whose step ended or None for an arrival, prompts computed)
        self.events: list[tuple[float, int, str | None, list[int]]] = []
        self.order = itertools.count()

    def run(self, num_requests: int) -> Result:
        """Serve requests until all have ended."""
        now = 0.0
        for number in range(num_requests):
            now += self.rng.expovariate(self.machine.requests_a_second)
            heapq.heappush(self.events, (now, next(self.order), None, [number]))
        while self.events:
            now, _, stepped, numbers = heapq.heappop(self.events)
            if stepped is None:
                self._arrive(numbers[0], now)
            else:
                self._end_step(stepped, numbers, now)
        return Result(
            fmean(self.first),
            _p95(self.first),
            fmean(self.whole),
            _p95(self.whole),
            self.num_cached / self.num_tokens,
        )

    def _arrive(self, number: int, now: float) -> None:
        prefix = 0 if self.rng.random() < 0.3 else self.rng.randrange(NUM_PREFIXES)
        asked = _prompt(prefix, self.rng.randrange(20, 400), number)
        name = self.choice.rank(asked, self.replicas, str(number))[0]
        self.choice.routed(str(number), asked, name)
        replica = self.replicas[name]
        num_cached = replica.cached.match(asked.reusable_keys) * PAGE_SIZE
        replica.cached.note(asked.keys)
        self.num_cached += num_cached
        self.num_tokens += asked.num_tokens
        self.began[number] = now
        replica.queue.append([number, asked.num_tokens - num_cached])
        if not replica.is_stepping:
            self._begin_step(name, now)

    def _begin_step(self, name: str, now: float) -> None:
        replica, machine = self.replicas[name], self.machine
        replica.is_stepping = bool(replica.queue or replica.left)
        if not replica.is_stepping:
            return
        room, computed = machine.step_tokens, []
        while replica.queue and room:
            taken = min(room, replica.queue[0][1])
            replica.queue[0][1] -= taken
            room -= taken
            if not replica.queue[0][1]:
                computed.append(replica.queue.pop(0)[0])
        seconds = machine.base_s + machine.prompt_token_s * (machine.step_tokens - room)
        seconds += machine.running_s * len(replica.left)
        heapq.heappush(self.events, (now + seconds, next(self.order), name, computed))

    def _end_step(self, name: str, computed: Sequence[int], now: float) -> None:
        left = self.replicas[name].left
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                del left[number]
                self.choice.ended(str(number))
                self.whole.append(now - self.began[number])
        for number in computed:
            left[number] = self.rng.choice((10, 40, 100, 300))
            self.choice.first_token(str(number))
            self.first.append(now - self.began[number])
        self._begin_step(name, now)


def _prompt(prefix: int, num_own: int, number: int) -> PromptPages:
    """Return a prompt of 8 to 40 common pages and tokens of its own, with short keys."""
    num_common = 8 + prefix % 5 * 8
    keys = [b"common %d %d" % (prefix, at) for at in range(num_common)]
    keys += [b"own %d %d" % (number, at) for at in range(num_own // PAGE_SIZE)]
    return PromptPages(num_common * PAGE_SIZE + num_own, PAGE_SIZE, tuple(keys))


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def simulated(
    machine: Machine, routing: Routing, weight: float, num_pages: int, num_requests: int
) -> Result:
    """Return the means over several seeds."""
    runs = [
        Simulation(machine, ReplicaChoice(routing, weight), num_pages, seed).run(num_requests)
        for seed in range(NUM_SEEDS)
    ]
    fields = Result.__slots__
    return Result(*(fmean(getattr(each, name) for each in runs) for name in fields))


def main() -> None:
    """Print a table for each machine: seconds, and the share of cached prompt tokens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--pages", type=int, default=300, help="of each replica's cache")
    given = parser.parse_args()
    ways: list[tuple[Routing, float]] = [("prefix", weight) for weight in WEIGHTS]
    ways += [("least_loaded", 0), ("round_robin", 0)]
    for machine in MACHINES:
        print(f"{machine.name}: first token, p95, whole answer, p95, cached")  # noqa: T201
        for routing, weight in ways:
            found = simulated(machine, routing, weight, given.pages, given.requests)
            numbers = " ".join(f"{getattr(found, name):7.3f}" for name in Result.__slots__)
            print(f"  {routing:12} {weight:4.0f} {numbers}")  # noqa: T201


if __name__ == "__main__":
    main()
