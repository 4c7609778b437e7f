"""The answer of /stats for all servers, as `ropewalk top` and the playground read it.

Counts are sums over all servers that the router has known, also of those that are gone. The queue
and the cache are those of servers that take requests.
"""

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

_OF_NOW = ("requests_running", "requests_waiting", "kv_cache_tokens")
_SAME = frozenset({"context_bounds", "bounds"})
_USAGE, _DISK, _REQUESTS = "kv_cache_usage_ratio", "kv_disk", "requests"

Stats = dict[str, Any]


class FleetStats:
    """The last answer of each server, and the counts of processes that are gone."""

    def __init__(self) -> None:
        self._last: dict[str, Stats] = {}  # by address
        self._ended: list[Stats] = []  # at most one, the sum

    def note(self, address: str, content: bytes) -> None:
        """Take the answer of a server. Raises ValueError if it is none."""
        stats = json.loads(content)
        if not isinstance(stats, dict) or _USAGE not in stats:
            raise ValueError("it is no answer of /stats")
        before = self._last.get(address)
        if before is not None and stats["prompt_tokens"] < before["prompt_tokens"]:
            self.end(address)  # another process is there
        self._last[address] = stats

    def end(self, address: str) -> None:
        """Keep the counts of a process that does not come back."""
        found = self._last.pop(address, None)
        if found is not None:
            self._ended = [_sum([*self._ended, found])]

    def render(self, present: Collection[str]) -> bytes:
        """Return the answer; `present` are the addresses that take requests."""
        found = _sum([*self._ended, *self._last.values()])
        now = [each for address, each in self._last.items() if address in present]
        for name in _OF_NOW:
            found[name] = sum(each[name] for each in now)
        found[_USAGE] = sum(each[_USAGE] for each in now) / max(1, len(now))
        disks = [each[_DISK] for each in now if each[_DISK] is not None]
        if found[_DISK] is not None:  # they share a folder
            found[_DISK]["bytes"] = max((each["bytes"] for each in disks), default=0)
            found[_DISK]["paused"] = any(each["paused"] for each in disks)
        return json.dumps(found).encode()


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
