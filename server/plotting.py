"""What pictures share: where they may be written, and how their axes look.

Imports neither torch nor, until something is drawn, matplotlib.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg")
COLOURS = ("#1f5f8b", "#d9822b")  # tell apart in grey, too


class PlotError(ValueError):
    """--plot cannot be done; the message names what is accepted and what was given."""


def check_can_plot(path: Path) -> None:
    """Before the work whose result is drawn. Raises PlotError."""
    if path.suffix not in _FORMATS:
        raise PlotError(f"--plot must end in {' or '.join(_FORMATS)}, got {str(path)!r}")
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'ropewalk[plot]'")
    if path.is_dir():
        raise PlotError(f"--plot: {path} is a folder")
    if not path.parent.is_dir():
        raise PlotError(f"--plot: there is no folder {path.parent}")


def tidy(axes: "Axes") -> None:
    """A light grid behind the data, and no frame where nothing is read off."""
    axes.minorticks_off()
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
