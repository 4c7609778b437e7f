"""The bounds of `context_bucket`, a label of metrics, if the settings state none."""

import math

from ropewalk.server.settings.fields import MAX_CONTEXT_BUCKETS


def default_context_buckets(native_len: int, max_len: int) -> tuple[int, ...]:
    """Return bucket bounds at fractions and multiples of the native length.

    The fractions keep ordinary traffic from falling into one bucket.
    """
    doublings = max(0, math.ceil(math.log2(max_len / native_len)))
    lowest = max(-7, doublings - MAX_CONTEXT_BUCKETS + 2)
    bounds = [int(native_len * 2**power) for power in range(min(lowest, 0), doublings + 1)]
    return tuple(bound for bound in bounds if bound >= 16)[-(MAX_CONTEXT_BUCKETS - 1) :]
