"""Autoscaling by tokens: the load of each replica, and the policy that Ray Serve calls with them.

A request is a bad unit of load: one may hold a hundred times the tokens of another. It is a file of
its own, because Ray's controller imports it. Nothing here imports Ray.
"""

import math
from typing import Any

_WAITING_STEPS = 8  # steps of prefill that wait and make a replica full
_TARGET = 0.7  # share of a replica that should be in use
_USAGE, _WAITING = b"ropewalk_kv_cache_usage_ratio", b"ropewalk_prompt_tokens_waiting"


def load_of(page: bytes, max_step_tokens: int) -> float:
    """Return the load that a server's metrics tell, as a share of what it holds: 1 is full."""
    found = {_USAGE: 0.0, _WAITING: 0.0}
    for line in page.splitlines():
        name, _, value = line.partition(b" ")
        if name in found:
            found[name] = float(value)
    return found[_USAGE] + found[_WAITING] / (_WAITING_STEPS * max_step_tokens)


def by_tokens(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas that the load asks for, and no state.

    `context`: Ray Serve's AutoscalingContext, with the `load` of each replica.
    """
    loads = (context.aggregated_metrics or {}).get("load") or {}
    if not loads:
        return context.target_num_replicas, {}
    wanted = math.ceil(sum(loads.values()) / _TARGET - 1e-9)
    lowest, highest = (
        context.capacity_adjusted_min_replicas,
        context.capacity_adjusted_max_replicas,
    )
    return min(max(wanted, lowest), highest), {}
