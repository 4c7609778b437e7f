"""Quantiles of cumulative counts, as Prometheus' histogram_quantile computes them."""

import bisect
from collections.abc import Sequence


def quantile(q: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the value that a share `q` of the observations does not exceed; None without any.

    `counts` are cumulative, one for each of `bounds` and a last one for all observations.

    Source: Prometheus, "histogram_quantile()", linear interpolation inside a bucket.
    """
    if counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    at = bisect.bisect_left(counts, rank)
    if at >= len(bounds):
        return bounds[-1]
    lower, before = (0.0, 0) if at == 0 else (bounds[at - 1], counts[at - 1])
    inside = counts[at] - before
    if inside == 0:
        return bounds[at]
    return lower + (bounds[at] - lower) * ((rank - before) / inside)
