"""Mixed load on a small queue and a small cache: nothing lost, nothing leaked, every count right.

SOAK_SECONDS, SOAK_SEED and SOAK_OUT (a folder for soak.json and soak.png) as in
docs/reliability.md.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.processes import Server, running_server
from tests.progress import say
from tests.server.attack import wait_until_idle
from tests.server.soak_client import SoakClient, Tally, alone
from tests.server.soak_watch import Trend, Watch, num_descriptors, rss_mib, wait_for, write
from tests.server.test_metrics import samples

SECONDS = float(os.environ.get("SOAK_SECONDS", "80"))
SEED = int(os.environ.get("SOAK_SEED", "20260117"))
OUT = os.environ.get("SOAK_OUT")
_CLIENTS = 14
_WARM_UP = 0.3  # of the time; nobody leaves early in it, so that every count is known exactly
_SAMPLE = 40  # greedy answers that are asked again, alone
_MOST_GROWTH = 0.10  # of memory, from the end of the warm-up to the end
_MOST_TREND = 0.01  # of memory, over the last half: less is the allocator's wandering
_CHANCE = 0.01

Counts = dict[str, Counter[str]]


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Two long contexts fill its cache, eight requests its batch, eight more its queue."""
    flags = {"--kv-cache-tokens": "4608", "--max-num-seqs": "8", "--max-queued-requests": "8"}
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
    """All clients together for so long; each ends after its last answer."""
    over, together = threading.Event(), Tally()
    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(each.run, over, may_leave=may_leave) for each in clients]
        over.wait(seconds)
        over.set()
        for each in running:
            together.add(each.result())
    return together


def check_counts(grown: Counter[tuple[str, str]], seen: Tally) -> None:
    """The server's counters say what the clients saw; to the bounds of what nobody saw."""
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
    """A phase of load and, when it is idle again, its counts."""
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


@pytest.mark.timeout(SECONDS + 240)
def test_a_soak_loses_nothing_and_leaks_nothing(small: Server) -> None:
    """answers, pages, memory, descriptors, counters"""
    say(f"\nSOAK_SEED={SEED} SOAK_SECONDS={SECONDS:g}")
    clients = [SoakClient(small.url, SEED, number) for number in range(_CLIENTS)]
    descriptors, before = num_descriptors(small.pid), counts(small)
    with Watch(small) as watch:
        seen = soaked(small, SECONDS * _WARM_UP, clients, may_leave=False)
        warm_mib, num_warm = rss_mib(small.pid), len(watch.moments)
        seen.add(soaked(small, SECONDS * (1 - _WARM_UP), clients, may_leave=True))
        time.sleep(1)
        end_mib = rss_mib(small.pid)
    last_half = [each.rss_mib for each in watch.moments[num_warm:]]
    trend = Trend.of(last_half[len(last_half) // 2 :])
    grown = counts(small) - before
    if OUT:
        summary = {"seed": SEED, "warm_mib": warm_mib, "end_mib": end_mib, "p": trend.p_rising}
        write(Path(OUT), watch.moments, {**summary, "outcomes": dict(seen.outcomes)})
    say(f"{warm_mib:.1f} MiB warm, {end_mib:.1f} at the end; last half: {trend}")
    _check_answers(small, seen)
    for what in ("preemptions", "prefix_cache_hits", "rope_rescales"):
        assert grown[what, ""] > 0, f"no {what}: the load is too light to show anything"
    assert seen.rejected["queue_full"] > 0
    assert wait_for(lambda: num_descriptors(small.pid) <= descriptors), num_descriptors(small.pid)
    assert end_mib <= warm_mib * (1 + _MOST_GROWTH)
    assert trend.p_rising > _CHANCE or trend.rise < _MOST_TREND * end_mib, trend
    assert not [line for line in small.log if "Traceback" in line], "".join(small.log[-100:])


def _check_answers(server: Server, seen: Tally) -> None:
    """One outcome each, ids that differ, and greedy texts as they are when asked alone."""
    assert len(set(seen.ids)) == len(seen.ids) == seen.outcomes["answered"]
    assert seen.outcomes["answered"] > 0
    sample = Random(SEED).sample(seen.greedy, min(_SAMPLE, len(seen.greedy)))
    assert sample
    different = [asked.body[:200] for asked, texts in sample if alone(server.url, asked) != texts]
    assert not different


def test_a_trend_is_seen_and_noise_is_none() -> None:
    """a leak of a tenth of the noise a second; the same noise without it"""
    rng = Random(0)
    noise = [600 + rng.gauss(0, 1) for _ in range(120)]
    assert Trend.of(noise).p_rising > 0.01
    leak = Trend.of([each + 0.1 * second for second, each in enumerate(noise)])
    assert leak.p_rising < 1e-6
    assert leak.rise == pytest.approx(11.9, abs=1)
    assert Trend.of([5.0] * 40) == Trend(0.5, 0.0)
