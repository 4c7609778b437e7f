"""The sum of the servers' answers of /stats, as `ropewalk top` and the playground read them."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

_SAME = frozenset({"context_bounds", "bounds"})
_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")
_USAGE, _DISK, _REQUESTS, _START = (
    "kv_cache_usage_ratio",
    "kv_disk",
    "requests",
    "start_time_seconds",
)

Stats = dict[str, Any]


def summed_stats(answers: Sequence[Stats]) -> Stats:
    """Return the sum of one answer or more.

    Histograms of other bounds cannot be added, so answers with other bounds than most are left out.
    """
    num_of = Counter(map(_bounds_of, answers))
    most = max(num_of, key=num_of.__getitem__)
    alike = [each for each in answers if _bounds_of(each) == most]
    found: Stats = _sum([_without(each, _REQUESTS, _START) for each in alike])
    found[_USAGE] /= len(alike)
    if found[_DISK] is not None:  # they share a folder
        disks = [each[_DISK] for each in alike if each[_DISK] is not None]
        found[_DISK]["bytes"] = max(each["bytes"] for each in disks)
        found[_DISK]["paused"] = any(each["paused"] for each in disks)
    requests: Counter[str] = Counter()
    for each in (request for stats in alike for request in stats[_REQUESTS]):
        requests[json.dumps(_without(each, "count"))] += each["count"]
    found[_REQUESTS] = [{**json.loads(labels), "count": num} for labels, num in requests.items()]
    return found


def _bounds_of(stats: Stats) -> str:
    """Return what answers must have in common so that their histograms can be added."""
    return json.dumps([stats["context_bounds"], *(stats[name]["bounds"] for name in _LATENCIES)])


def _without(fields: Stats, *names: str) -> Stats:
    return {name: value for name, value in fields.items() if name not in names}


def _sum(values: Sequence[Any]) -> Any:
    """Return the sum of numbers, or of what lists and objects have in the same places."""
    known = [each for each in values if each is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        names = dict.fromkeys(name for each in known for name in each)
        return {
            name: known[0][name]
            if name in _SAME
            else _sum([each[name] for each in known if name in each])
            for name in names
        }
    if isinstance(known[0], list):
        return [_sum(each) for each in zip(*known, strict=True)]
    return sum(known)
