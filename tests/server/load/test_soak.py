"""Mixed load on a small queue and a small cache: no request lost, no leak, every count right.

SOAK_SECONDS and SOAK_SEED as in docs/design/reliability.md.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import pytest

from tests.server.fuzz.attack import wait_until_idle
from tests.server.load.soak_client import SoakClient, Tally, alone
from tests.server.load.soak_watch import (
    Moment,
    Trend,
    Watch,
    wait_for,
)
from tests.server.test_metrics import samples
from tests.servers.processes import Server, num_descriptors, rss_mib, running_server
from tests.servers.progress import say

pytestmark = [pytest.mark.alone, pytest.mark.long]

SECONDS = float(os.environ.get("SOAK_SECONDS", "25"))
SEED = int(os.environ.get("SOAK_SEED", "20260117"))
_CLIENTS = 14
_WARM_UP = 0.3  # of the time; no client leaves early in it, so that every count is known exactly
_SAMPLE = 24  # greedy answers that are asked again, alone
_MOST_GROWTH = 0.10  # of memory, from the end of the warm-up to the end
_MOST_TREND = 0.01  # of memory, over the last half: less is the allocator's wandering
# A trend is looked for after so many tokens, in at least so many seconds. Libraries' caches fill
# with work, not with time: measured from the first second, memory rose by 2.5 % in 16,000 tokens
# and was flat up to 22,000, which took two minutes; on a busy machine 16,000 took five minutes.
_SETTLED_TOKENS, _LEAST_SECONDS = 16_000, 30
_CHANCE = 0.01


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """One long context fills its cache, eight requests its batch, eight more its queue."""
    flags = {"--kv-cache-tokens": "2304", "--max-num-seqs": "8", "--max-queued-requests": "8"}
    with running_server(*(part for flag in flags.items() for part in flag)) as running:
        yield running


def counts(server: Server) -> Counter[tuple[str, str]]:
    """(metric, its label that matters here) -> count so far."""
    which = {
        "ropewalk_requests_total": ("finish_reason",),
        "ropewalk_requests_rejected_total": ("reason",),
        "ropewalk_http_requests_total": ("route", "status"),
        "ropewalk_prompt_tokens_total": (),
        "ropewalk_generated_tokens_total": (),
        "ropewalk_preemptions_total": (),
        "ropewalk_prefix_cache_hits_total": (),
        "ropewalk_rope_rescales_total": (),
    }
    found: Counter[tuple[str, str]] = Counter()
    for (name, labels), count in samples(server).items():
        if name in which:
            label = " ".join(dict(labels)[each] for each in which[name])
            found[name.removeprefix("ropewalk_").removesuffix("_total"), label] += int(count)
    return found


def load(clients: list[SoakClient], seconds: float, *, may_leave: bool) -> Tally:
    """Run all clients for so long; each ends after its last answer."""
    over, together = threading.Event(), Tally()
    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(each.run, over, may_leave=may_leave) for each in clients]
        over.wait(seconds)
        over.set()
        for each in running:
            together.add(each.result())
    return together


def check_counts(grown: Counter[tuple[str, str]], seen: Tally) -> None:
    """Compare the server's counters with the clients' tallies, within the unknown ones."""
    total = {reason: grown["requests", reason] for reason in ("stop", "length", "abort", "error")}
    rejected = Counter(
        {label: n for (name, label), n in grown.items() if name == "requests_rejected" and n}
    )
    # A client that left before its answer may have been refused, too: one outcome each.
    unseen = rejected - seen.rejected
    assert set(unseen) <= {"queue_full"}
    assert not seen.rejected - rejected
    assert sum(total.values()) + unseen.total() == seen.finished.total() + seen.num_left
    assert total["error"] == 0
    assert total["abort"] <= seen.num_left
    for reason in ("stop", "length"):
        assert 0 <= total[reason] - seen.finished[reason] <= seen.num_left
    most = seen.left_tokens
    assert 0 <= grown["prompt_tokens", ""] - seen.prompt_tokens <= most
    assert 0 <= grown["generated_tokens", ""] - seen.generated_tokens <= most
    for path in ("/v1/completions", "/v1/chat/completions"):
        statuses = Counter(
            {
                int(label.split()[1]): n
                for (name, label), n in grown.items()
                if name == "http_requests" and label.split()[0] == path and n
            }
        )
        known = Counter({status: n for (of, status), n in seen.http.items() if of == path})
        assert not known - statuses
        assert set(statuses - known) <= {200, 429, 499}
        assert statuses.total() == known.total() + seen.left_whole[path]


def soaked(server: Server, seconds: float, clients: list[SoakClient], *, may_leave: bool) -> Tally:
    """Run one phase of load and, when the server is idle again, check its counts."""
    before = counts(server)
    seen = load(clients, seconds, may_leave=may_leave)
    gauges = wait_until_idle(server)
    assert not any(gauges.values()), gauges
    assert wait_for(lambda: _num_http(server, before) == seen.num_asked)
    grown = counts(server) - before
    say(f"outcomes {dict(seen.outcomes)}; finished {dict(seen.finished)}; left {seen.num_left}")
    say(f"refused {dict(seen.rejected)}; {dict(grown)}")
    assert not seen.wrong, f"{len(seen.wrong)} wrong\n" + "\n".join(seen.wrong[:10])
    check_counts(grown, seen)
    return seen


def _num_http(server: Server, before: Counter[tuple[str, str]]) -> int:
    """Requests to the generating routes that are over, counted by the server."""
    grown = counts(server) - before
    return sum(
        n for (name, label), n in grown.items() if name == "http_requests" and "/v1/" in label
    )


def trend_of(moments: Sequence[Moment]) -> Trend:
    """The trend of memory over the last half; no trend if too few seconds were seen."""
    last = moments[len(moments) // 2 :]
    settled = [each.rss_mib for each in last if each.generated_tokens >= _SETTLED_TOKENS]
    if len(settled) < _LEAST_SECONDS:
        say(f"no trend is known from {len(settled)} s after {_SETTLED_TOKENS} tokens")
        return Trend(0.5, 0.0)
    return Trend.of(settled)


@dataclass(frozen=True)
class Soak:
    """The results of the load."""

    server: Server
    seen: Tally
    grown: Counter[tuple[str, str]]
    num_descriptors: int  # before
    warm_mib: float
    end_mib: float
    trend: Trend


@pytest.fixture(scope="module")
def soak(small: Server) -> Soak:
    """The load, once for all tests of this file; its counts are checked on the way."""
    say(f"\nSOAK_SEED={SEED} SOAK_SECONDS={SECONDS:g}")
    clients = [SoakClient(small.url, SEED, number) for number in range(_CLIENTS)]
    descriptors, before = num_descriptors(small.pid), counts(small)
    with Watch(small) as watch:
        seen = soaked(small, SECONDS * _WARM_UP, clients, may_leave=False)
        warm_mib, num_warm = rss_mib(small.pid), len(watch.moments)
        seen.add(soaked(small, SECONDS * (1 - _WARM_UP), clients, may_leave=True))
        end_mib = rss_mib(small.pid)
    trend = trend_of(watch.moments[num_warm:])
    say(f"{warm_mib:.1f} MiB warm, {end_mib:.1f} at the end; last half: {trend}")
    return Soak(small, seen, counts(small) - before, descriptors, warm_mib, end_mib, trend)


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_is_lost_or_answered_twice(soak: Soak) -> None:
    """Request ids differ, and a sample of greedy texts equals the same requests alone."""
    seen = soak.seen
    assert len(set(seen.ids)) == len(seen.ids) == seen.outcomes["answered"]
    sample = Random(SEED).sample(seen.greedy, min(_SAMPLE, len(seen.greedy)))
    assert sample
    url = soak.server.url
    different = [asked.body[-300:] for asked, texts in sample if alone(url, asked) != texts]
    assert not different


@pytest.mark.timeout(SECONDS + 300)
def test_the_load_reached_what_it_was_made_for(soak: Soak) -> None:
    """The load reaches preemptions, shared prefixes, crossings, full queues and lost clients."""
    names = ["prefix_cache_hits"]
    # On a slow machine, or in a short run, too few are asked for and run at once.
    if soak.seen.outcomes["answered"] > 100:
        names.append("rope_rescales")
    if soak.seen.outcomes["answered"] > 500:
        names.append("preemptions")
    for name in names:
        assert sum(n for (of, _), n in soak.grown.items() if of == name) > 0, name
    assert soak.seen.rejected["queue_full"] > 0
    assert soak.seen.num_left > 0
    assert min(soak.seen.finished[reason] for reason in ("stop", "length")) > 0


@pytest.mark.timeout(SECONDS + 300)
def test_descriptors_and_pages_are_back(soak: Soak) -> None:
    """The server ends with no more descriptors than before, and its log has no traceback."""
    pid = soak.server.pid
    assert wait_for(lambda: num_descriptors(pid) <= soak.num_descriptors), num_descriptors(pid)
    assert not any(wait_until_idle(soak.server).values())
    assert not [line for line in soak.server.log if "Traceback" in line]


@pytest.mark.timeout(SECONDS + 300)
def test_memory_is_flat(soak: Soak) -> None:
    """Memory ends little above the warm-up, without a trend in the last half of a long run."""
    assert soak.end_mib <= soak.warm_mib * (1 + _MOST_GROWTH)
    rises = soak.trend.p_rising < _CHANCE and soak.trend.rise > _MOST_TREND * soak.end_mib
    assert not rises, soak.trend
