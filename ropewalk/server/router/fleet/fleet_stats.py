"""The answer of /stats for all servers, as `ropewalk top` and the playground read it.

Counts are sums over all servers that the router has known, also of those that are gone. The queue
and the cache are those of servers that take requests.
"""

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

_OF_NOW = ("requests_running", "requests_waiting", "kv_cache_tokens", "kv_cache_bytes")
_SAME = frozenset({"context_bounds", "bounds"})
_GROWING = ("prompt_tokens", "prompt_tokens_cached", "generated_tokens", "preemptions")
_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")
_USAGE, _DISK, _REQUESTS = "kv_cache_usage_ratio", "kv_disk", "requests"
_MEMORY = "kv_offload"
_START = "start_time_seconds"

Stats = dict[str, Any]


class FleetStats:
    """The last answer of each server, and the counts of processes that are gone.

    Answers are added if their histograms have the same bounds. Those with other bounds are left out
    as long as no such server takes requests.
    """

    def __init__(self) -> None:
        self._last: dict[str, Stats] = {}  # by address
        self._ended: dict[str, Stats] = {}  # sums, by bounds

    def note(self, address: str, content: bytes) -> None:
        """Take the answer of a server. Raises ValueError if it is none."""
        stats = json.loads(content)
        if not isinstance(stats, dict) or _USAGE not in stats:
            raise ValueError("it is no answer of /stats")
        before = self._last.get(address)
        if before is not None:
            start = stats.get(_START)  # absent in older servers
            is_same = start is not None and start == before.get(_START)
            has_fallen = any(stats[name] < before[name] for name in _GROWING)
            if is_same and has_fallen:
                return  # it was overtaken on its way by a later one
            if has_fallen or start != before.get(_START):
                self.end(address)  # another process is there
        self._last[address] = stats

    def end(self, address: str) -> None:
        """Keep the counts of a process that does not come back."""
        found = self._last.pop(address, None)
        if found is not None:
            bounds = _bounds_of(found)
            so_far = [self._ended[bounds]] if bounds in self._ended else []
            self._ended[bounds] = _sum([*so_far, found])

    def render(self, present: Collection[str]) -> bytes:
        """Return the answer; `present` are the addresses that take requests.

        There is at least one answer.
        """
        num_of = Counter(_bounds_of(self._last[each]) for each in present if each in self._last)
        every = [*self._last.values(), *self._ended.values()]
        bounds = num_of.most_common(1)[0][0] if num_of else _bounds_of(every[0])
        alike = {name: each for name, each in self._last.items() if _bounds_of(each) == bounds}
        ended = [self._ended[bounds]] if bounds in self._ended else []
        found = _sum([*ended, *alike.values()])
        now = [each for address, each in alike.items() if address in present]
        found.pop(_START, None)
        for name in _OF_NOW:
            found[name] = sum(each.get(name, 0) for each in now)  # older servers have fewer
        found[_USAGE] = sum(each[_USAGE] for each in now) / max(1, len(now))
        disks = [each[_DISK] for each in now if each[_DISK] is not None]
        if found[_DISK] is not None:  # they share a folder
            found[_DISK]["bytes"] = max((each["bytes"] for each in disks), default=0)
            found[_DISK]["paused"] = any(each["paused"] for each in disks)
        if found.get(_MEMORY) is not None:  # each has its own; servers of before have no such name
            memories = [each[_MEMORY] for each in now if each.get(_MEMORY) is not None]
            found[_MEMORY]["bytes"] = sum(each["bytes"] for each in memories)
        return json.dumps(found).encode()


def _bounds_of(stats: Stats) -> str:
    """Return what answers must have in common so that their histograms can be added."""
    return json.dumps([stats["context_bounds"], *(stats[name]["bounds"] for name in _LATENCIES)])


def _sum(all_stats: list[Stats]) -> Stats:
    """Return the sums of all numbers; there is at least one answer."""
    found: Stats = _added(all_stats)
    num_of: Counter[str] = Counter()
    for stats in all_stats:
        for each in stats[_REQUESTS]:
            labels = {name: value for name, value in each.items() if name != "count"}
            num_of[json.dumps(labels)] += each["count"]
    found[_REQUESTS] = [{**json.loads(labels), "count": num} for labels, num in num_of.items()]
    return found


def _added(values: list[Any]) -> Any:
    """Return the sum of numbers, or of what lists and objects have in the same places."""
    known = [each for each in values if each is not None]
    if not known or isinstance(known[0], str):
        return known[0] if known else None
    if isinstance(known[0], dict):
        names = dict.fromkeys(name for each in known for name in each)
        return {
            name: known[0][name]
            if name in _SAME
            else _added([each[name] for each in known if name in each and name != _REQUESTS])
            for name in names
        }
    if isinstance(known[0], list):
        return [_added(list(each)) for each in zip(*known, strict=True)]
    return sum(known)
