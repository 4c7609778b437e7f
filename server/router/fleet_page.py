"""The metrics of all servers as one page, whose counters survive a server.

Counters and histograms are sums over all servers that the router has known. One that is lost stays
in the sum with its last numbers. If its address begins anew from zero, both count. Gauges tell of
servers that take requests, and have a label `server`.

Pages are merged as text: the series of two servers are the same if their lines are but for the
number. The client library's own parser takes fifty times as long.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from prometheus_client.utils import floatToGoString

_SUMMED = frozenset({b"counter", b"histogram"})
_START = b"process_start_time_seconds"

Series = dict[bytes, float]  # by name and labels


@dataclass(slots=True)
class _Page:
    """The page of one process."""

    about: dict[bytes, list[bytes]] = field(default_factory=dict)  # comments of each family
    kinds: dict[bytes, bytes] = field(default_factory=dict)
    series: dict[bytes, Series] = field(default_factory=dict)  # by family

    @classmethod
    def of(cls, text: bytes) -> "_Page":
        """Read a page in Prometheus' text format. Raises ValueError if it is none."""
        page, family = cls(), b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                _, word, family, *rest = line.split(b" ", 3)
                page.about.setdefault(family, []).append(line)
                page.series.setdefault(family, {})
                if word == b"TYPE" and rest:
                    page.kinds[family] = rest[0]
            elif line:
                name, _, value = line.rpartition(b" ")
                page.series.setdefault(family, {})[name] = float(value)
        return page

    @property
    def start(self) -> float | None:
        """Return when the process began; None if the page does not tell, as outside of Linux."""
        return self.series.get(_START, {}).get(_START)

    def counts(self) -> Iterator[tuple[bytes, bytes, float]]:
        """Yield the family, series and value of everything that is summed."""
        for family, kind in self.kinds.items():
            if kind in _SUMMED:
                for name, value in self.series[family].items():
                    yield family, name, value

    def has_fallen_since(self, before: "_Page") -> bool:
        """Return whether a count is lower than it was."""
        found = {name: value for _, name, value in self.counts()}
        return any(found.get(name, 0.0) < value for _, name, value in before.counts())


class FleetPage:
    """The last page of each server, and the counts of processes that are gone."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}  # by address
        self._ended: dict[bytes, Series] = {}  # counts of processes whose address began anew

    def note(self, address: str, text: bytes) -> None:
        """Take the page of a server. Raises ValueError if it is none."""
        page = _Page.of(text)
        before = self._pages.get(address)
        if before is not None:
            is_same = page.start is not None and page.start == before.start
            has_fallen = page.has_fallen_since(before)
            if is_same and has_fallen:
                return  # it was overtaken on its way by a later one
            if has_fallen or page.start != before.start:
                _add(self._ended, before)
        self._pages[address] = page

    def render(self, present: Collection[str]) -> bytes:
        """Return the page; `present` are the addresses whose gauges are shown."""
        sums: dict[bytes, Series] = {family: {**each} for family, each in self._ended.items()}
        for page in self._pages.values():
            _add(sums, page)
        lines: list[bytes] = []
        about = {name: page for page in self._pages.values() for name in page.about}
        for family, page in about.items():
            is_summed = page.kinds.get(family) in _SUMMED
            found = sums.get(family, {}) if is_summed else self._gauges(family, present)
            if found or is_summed:
                lines += page.about[family]
            lines += (b"%b %b" % (name, _text(value)) for name, value in found.items())
        return b"".join(line + b"\n" for line in lines)

    def _gauges(self, family: bytes, present: Collection[str]) -> Series:
        found: Series = {}
        for address, page in self._pages.items():
            if address in present:
                for name, value in page.series.get(family, {}).items():
                    found[_labelled(name, address)] = value
        return found


def _add(sums: dict[bytes, Series], page: _Page) -> None:
    for family, name, value in page.counts():
        series = sums.setdefault(family, {})
        series[name] = series.get(name, 0.0) + value


def _labelled(series: bytes, address: str) -> bytes:
    """Return the name of a series with a further label."""
    label = b'server="%b"' % address.encode()
    if series.endswith(b"}"):
        return series[:-1] + b"," + label + b"}"
    return series + b"{" + label + b"}"


def _text(value: float) -> bytes:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text.encode()
