"""Helpers for all plots: the check of the output path, and the look of the axes.

This module does not import torch. It imports matplotlib only when a plot is drawn.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg")
COLOURS = ("#1f5f8b", "#d9822b")  # distinct in grey, too


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
        raise PlotError("--plot needs matplotlib: pip install 'ropewalk[plot]'")
    if path.is_dir():
        raise PlotError(f"--plot: {path} is a folder")
    if not path.parent.is_dir():
        raise PlotError(f"--plot: there is no folder {path.parent}")


def tidy(axes: "Axes") -> None:
    """Draw a light grid behind the data, and remove the frame on sides without a scale."""
    axes.minorticks_off()
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
