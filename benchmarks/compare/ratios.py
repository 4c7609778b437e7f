"""Medians over rounds, and the ratios of server A to server B."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured quantity, its unit, and the better direction."""

    name: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class Ratio:
    """The factor by which A is better than B. Above 1, A is better for every metric.

    Each round gives one ratio, because both servers met the same state of the machine in it.
    """

    median: float
    lowest: float
    highest: float


def ratio(
    a_by_round: Mapping[int, float], b_by_round: Mapping[int, float], metric: Metric
) -> Ratio | None:
    """Return the ratio over the rounds that both have, else None. Values must be above 0."""
    both = sorted(a_by_round.keys() & b_by_round.keys())
    if not both:
        return None
    found = [a_by_round[each] / b_by_round[each] for each in both]
    if not metric.higher_is_better:
        found = [1 / each for each in found]
    return Ratio(median(found), min(found), max(found))


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: one metric of one scenario. `by_server`: values by round, A's first."""

    scenario: str
    metric: Metric
    by_server: tuple[Mapping[int, float], ...]

    def cells(self) -> list[str]:
        """Return the cells as text, with a dash for a missing number."""
        cells = [self.scenario, f"{self.metric.name}, {self.metric.unit}"]
        cells += [_number(median(each.values())) if each else "-" for each in self.by_server]
        if len(self.by_server) > 1:
            a_by_round, b_by_round = self.by_server
            found = ratio(a_by_round, b_by_round, self.metric)
            cells += ["-", "-"] if found is None else [
                f"{found.median:.2f}", f"{found.lowest:.2f} to {found.highest:.2f}"
            ]  # fmt: skip
        cells.append("/".join(dict.fromkeys(str(len(each)) for each in self.by_server)))
        return cells


def table(lines: Sequence[Line], names: Sequence[str], *, markdown: bool) -> str:
    """Build a table with a line per metric: medians over rounds, and A/B with its range."""
    head = ["scenario", "metric", *names]
    if len(names) > 1:
        head += ["/".join(names), "lowest to highest"]
    rows = [[*head, "rounds"], *(each.cells() for each in lines)]
    if markdown:
        rows.insert(1, ["---"] * 2 + ["---:"] * (len(rows[0]) - 2))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _number(value: float) -> str:
    """Format a number with four significant digits, or from 1,000 up with one decimal."""
    return f"{value:.1f}" if value >= 1000 else f"{value:.4g}"
