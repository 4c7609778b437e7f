"""Helpers for all plots: the check of the output path, and the look of the axes.

This module does not import torch. It imports matplotlib only when a plot is drawn.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg")
INSTALL_MATPLOTLIB = "pip install 'matplotlib>=3.8'"
COLOURS = ("#1f5f8b", "#d9822b")  # distinct in grey, too


_MOST_TICKS = 9
# Leading digits of ticks, coarse to fine.
_DIGITS = ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), tuple(map(float, range(1, 10))))
_NARROW, _MARGIN = 1.5, 1.25  # a range below the first ratio is widened by the second at each end
_EDGE = 1.04  # of the limits beyond the last ticks, so that a marker there is whole
_LEAST_RATIO = 1.2  # of two labelled lengths, so that their labels do not overlap


class PlotError(ValueError):
    """An unusable --plot; the message names the accepted and the given value."""


def can_plot() -> bool:
    """Return whether matplotlib is installed (the extra `plot`)."""
    return find_spec("matplotlib") is not None


def check_can_plot(path: Path) -> None:
    """Check the path of a plot before the work starts. Raises PlotError."""
    if path.suffix not in _FORMATS:
        raise PlotError(f"--plot must end in {' or '.join(_FORMATS)}, got {str(path)!r}")
    if not can_plot():
        raise PlotError(f"--plot needs matplotlib: {INSTALL_MATPLOTLIB}")
    if path.is_dir():
        raise PlotError(f"--plot: {path} is a folder")
    if not path.parent.is_dir():
        raise PlotError(f"--plot: there is no folder {path.parent}")


@contextmanager
def new_figure(
    path: Path, width: float, height: float, title: str = "", **options: Any
) -> Iterator["Figure"]:
    """Yield a figure of so many inches, and write it to the file at the end."""
    # Optional, and slow to import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    if title:
        figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150, **options)


def percent_axis(axis: "Axis") -> None:
    """Label shares as percent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def tidy(axes: "Axes", grid: Literal["both", "x", "y"] = "both") -> None:
    """Draw a light grid behind the data, and remove the frame on sides without a scale."""
    axes.minorticks_off()
    axes.grid(visible=True, axis=grid, color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def enclosing_ticks(low: float, high: float) -> list[float]:
    """Return 3 ticks or more for a logarithmic axis; the first is <= low, the last >= high.

    Both numbers are above 0, and may be equal.
    """
    # Imported here, because the module is imported by commands that draw nothing.
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    if high < _NARROW * low:  # a few percent would otherwise fill the axis
        low, high = low / _MARGIN, high * _MARGIN
    coarse = _between(low, high, _DIGITS[0])
    if len(coarse) > _MOST_TICKS:
        return _between(low, high, (1.0,))
    for digits in _DIGITS:
        found = _between(low, high, digits)
        if len(found) >= 3:
            return found
    # Between two digits, such as 2.1 to 2.9: steps of equal size.
    return [float(each) for each in MaxNLocator(nbins=5).tick_values(low, high)]


def length_ticks(lens: Sequence[float]) -> list[float]:
    """Return ticks for a logarithmic axis of lengths: the measured ones, and others if few.

    `lens` has a length or more.
    """
    ticks = set(lens)
    if len(ticks) < 3:
        others = enclosing_ticks(min(lens), max(lens))
        ticks |= {
            other
            for other in others
            if all(max(other / each, each / other) >= _LEAST_RATIO for each in lens)
        }
    return sorted(ticks)


def label_logarithmic(axis: "Axis", ticks: Sequence[float], texts: Sequence[str]) -> None:
    """Make these the only ticks of a logarithmic axis; its limits grow to hold all of them.

    The caller says in the axis' label that the scale is logarithmic.
    """
    axis.set_ticks(list(ticks), labels=list(texts))
    axis.set_ticks([], minor=True)


def use_log_scale(
    panels: Sequence["Axes"], values: Sequence[float], text: Callable[[float], str]
) -> None:
    """Make the vertical axis of panels logarithmic, with ticks and limits around all values.

    The caller says in the label that the scale is logarithmic.
    """
    ticks = enclosing_ticks(min(values), max(values))
    for axes in panels:
        axes.set_yscale("log")
        axes.set_ylim(ticks[0] / _EDGE, ticks[-1] * _EDGE)
        label_logarithmic(axes.yaxis, ticks, [text(tick) for tick in ticks])


def milliseconds_text(value: float) -> str:
    """Format milliseconds in the unit that is read most easily: 0.5 ms, 50 ms, 1.5 s."""
    return f"{value:.6g} ms" if abs(value) < 1000 else f"{value / 1000:,.6g} s"


def _between(low: float, high: float, digits: Sequence[float]) -> list[float]:
    """Return digits times powers of ten, from the last one <= low to the first one >= high."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    grid = [digit * 10.0**power for power in powers for digit in digits]
    first = max(each for each in grid if each <= low)
    last = min(each for each in grid if each >= high)
    return [each for each in grid if first <= each <= last]
