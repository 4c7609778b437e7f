"""The metrics of all servers as one page, whose counters survive a server.

Counters and histograms are sums over all servers, of what they have counted since the router knows
them. So no sum jumps when a server joins. One that is lost stays in the sum with its last numbers.
If its address begins anew from zero, both count. Gauges tell of servers that take requests, and
have a label `server`.

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
    summed: set[bytes] = field(default_factory=set)  # families
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
                if word == b"TYPE" and rest and rest[0] in _SUMMED:
                    page.summed.add(family)
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
        for family in self.summed:
            for name, value in self.series[family].items():
                yield family, name, value

    def is_of_another(self, before: "_Page") -> bool:
        """Return whether another process gave this page than the one before."""
        if self.start is not None:
            return self.start != before.start
        # Keys may go and come again, but nothing else falls.
        return any(
            self.series.get(family, {}).get(name, value) < value
            for family, name, value in before.counts()
        )


class FleetPage:
    """The last page of each server, and what is counted without one."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}  # by address
        # What is added to the sums over pages: counts of processes and series that are gone, less
        # those from before the router knew a server.
        self._beside: dict[bytes, Series] = {}
        self._about: dict[bytes, list[bytes]] = {}  # comments of each family
        self._summed: set[bytes] = set()
        self._shown: Series = {}  # what was shown last of everything that is summed

    def note(self, address: str, text: bytes) -> None:
        """Take the newest page of a server. Raises ValueError if it is none."""
        page = _Page.of(text)
        before = self._pages.get(address)
        if before is None:
            for family, name, value in page.counts():
                self._add(family, name, -value)
        else:
            self._keep_lost(before, page)
        self._about.update(page.about)
        self._summed |= page.summed
        page.about = {}
        self._pages[address] = page

    def _keep_lost(self, before: _Page, page: _Page) -> None:
        """Keep the counts of a former page that the new one does not go on with."""
        is_another = page.is_of_another(before)
        for family, name, value in before.counts():
            found = page.series.get(family, {}).get(name)
            if is_another or found is None or found < value:
                self._add(family, name, value)

    def _add(self, family: bytes, name: bytes, value: float) -> None:
        series = self._beside.setdefault(family, {})
        series[name] = series.get(name, 0.0) + value

    def end(self, address: str) -> None:
        """Keep the counts of a server, and forget the rest. It may come back."""
        page = self._pages.pop(address, None)
        if page is not None:
            for family, name, value in page.counts():
                self._add(family, name, value)

    def render(self, present: Collection[str]) -> bytes:
        """Return the page; `present` are the addresses whose gauges are shown."""
        sums = {family: {**each} for family, each in self._beside.items()}
        for page in self._pages.values():
            for family, name, value in page.counts():
                series = sums.setdefault(family, {})
                series[name] = series.get(name, 0.0) + value
        lines: list[bytes] = []
        for family, about in self._about.items():
            is_summed = family in self._summed
            found = sums.get(family, {}) if is_summed else self._gauges(family, present)
            if found or is_summed:
                lines += about
            for name, value in found.items():
                shown = value
                if is_summed:  # rounding of a sum in another order may not look like a reset
                    shown = self._shown[name] = max(value, self._shown.get(name, 0.0))
                lines.append(b"%b %b" % (name, _text(shown)))
        return b"".join(line + b"\n" for line in lines)

    def _gauges(self, family: bytes, present: Collection[str]) -> Series:
        found: Series = {}
        for address, page in self._pages.items():
            if address in present:
                for name, value in page.series.get(family, {}).items():
                    found[_labelled(name, address)] = value
        return found


def _labelled(series: bytes, address: str) -> bytes:
    """Return the name of a series with a further label."""
    label = b'server="%b"' % address.encode()
    if series.endswith(b"}"):
        return series[:-1] + b"," + label + b"}"
    return series + b"{" + label + b"}"


def _text(value: float) -> bytes:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text.encode()
