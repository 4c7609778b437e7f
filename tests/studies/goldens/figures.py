"""A drawn figure in words: its size, its axes with scales, ticks and labels, and their content."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend


def in_words(figure: Figure, dpi: float) -> dict[str, Any]:
    """Describe a figure as a value of JSON; `dpi` is that of its file."""
    return {
        "pixels": [round(float(each) * dpi) for each in figure.get_size_inches()],
        "title": figure.get_suptitle(),
        "labels": [figure.get_supxlabel(), figure.get_supylabel()],
        "legends": [_legend(each) for each in figure.legends],
        "axes": [_axes(each) for each in figure.axes],
    }


def _axes(axes: Axes) -> dict[str, Any]:
    if not axes.axison:
        return {"off": True}
    own = axes.get_legend()
    return {
        "title": axes.get_title(),
        "x": _axis(axes.get_xlabel(), axes.get_xscale(), axes.get_xlim(), axes.xaxis),
        "y": _axis(axes.get_ylabel(), axes.get_yscale(), axes.get_ylim(), axes.yaxis),
        "sides": sorted(side for side, spine in axes.spines.items() if spine.get_visible()),
        "legend": own and _legend(own),
        "lines": [
            {
                "label": line.get_label(),
                "look": f"{_colour(line.get_color())} {line.get_linestyle()!r} "
                f"{line.get_marker()!r} {line.get_linewidth():g} {line.get_markersize():g} "
                f"{_colour(line.get_markerfacecolor())} {line.get_alpha()}",
                "x": _numbers(line.get_xdata()),
                "y": _numbers(line.get_ydata()),
            }
            for line in axes.lines
        ],
        "shapes": [
            {
                "kind": "lines" if isinstance(each, LineCollection) else "area",
                "colour": [_colour(colour) for colour in each.get_edgecolor()],
                "alpha": each.get_alpha(),
                "corners": [_numbers(path.vertices.ravel()) for path in each.get_paths()],
            }
            for each in axes.collections
        ],
        "images": [
            {"cells": [_numbers(row) for row in np.ma.filled(each.get_array(), math.nan)],
             "limits": _numbers(each.get_clim()), "colours": each.get_cmap().name}
            for each in axes.images
        ],
        "texts": [
            [each.get_text(), *_numbers(each.get_position()), _colour(each.get_color()),
             each.get_ha(), each.get_va()]
            for each in axes.texts
        ],
    }  # fmt: skip


def _axis(label: str, scale: str, limits: Sequence[float], axis: Any) -> dict[str, Any]:
    shown = [each.get_text() for each in axis.get_ticklabels()]
    return {
        "label": label,
        "scale": scale,
        "limits": _numbers(limits),
        "ticks": _numbers(axis.get_ticklocs()),
        "texts": shown,
    }


def _legend(legend: Legend) -> dict[str, Any]:
    return {
        "title": legend.get_title().get_text(),
        "texts": [each.get_text() for each in legend.get_texts()],
    }


def _colour(colour: Any) -> str:
    return to_hex(colour, keep_alpha=True)


def _numbers(values: Any) -> list[float | None]:
    """Return numbers with five digits, of a long curve about twenty; None is not a number."""
    found = [float(each) for each in values]
    found = found[:: max(1, len(found) // 20)]
    return [None if not math.isfinite(each) else float(f"{each:.5g}") for each in found]
