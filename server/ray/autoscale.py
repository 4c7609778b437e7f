"""Autoscaling by tokens: the load of each replica, and the policy that Ray Serve calls with them.

A request is a bad unit of load: one may hold a hundred times the tokens of another. Nothing here
imports Ray, whose controller imports this module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.model_runtime.config import EngineConfig

_WAITING_STEPS = 8  # steps of prefill that wait and make a replica full
_TARGET = 0.7  # share of a replica that should be in use


@dataclass(slots=True)
class TokenLoad:
    """The tokens of a replica's requests."""

    waiting: int = 0  # prompt tokens of requests without a first token
    running: Sequence[int] = ()  # tokens, prompt and answer, of each of the other ones

    def share_of(self, config: EngineConfig) -> float:
        """Return the load as a share of what an engine holds: 1 is full.

        Of layers with a window, a request holds its window only.
        """
        waiting = self.waiting / (_WAITING_STEPS * config.max_num_batched_tokens)
        if config.page_groups is None:
            return sum(self.running) / config.capacity + waiting
        num_held = sum(config.num_held_pages(each) for each in self.running)
        return num_held / config.num_pages + waiting


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
