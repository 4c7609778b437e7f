"""The part of a mixture's weights that one token reads, and the tokens a second that it allows.

The sizes are those of the model without memory. The speed is that of this machine's memory.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ropewalk.model_runtime.layers.experts.low_bit import is_experts
from ropewalk.model_runtime.loading.config_values import text_values
from ropewalk.model_runtime.loading.low_bits.sizes import Storage
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.size_text import size_text

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_RATE_BYTES = 1 << 28  # more than caches hold
_RATE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Active:
    """The experts of a token, and the weights that it reads with them."""

    num_chosen: int
    num_experts: int
    num_parameters: int  # that a token reads
    num_all: int
    num_bytes: int  # of these parameters, once loaded
    num_all_bytes: int

    def __str__(self) -> str:
        """Return the text of the banner."""
        return (
            f"{self.num_chosen} of {self.num_experts} for a token: "
            f"{self.num_parameters / 1e6:,.4g} million of {self.num_all / 1e6:,.4g} million "
            f"parameters, {size_text(self.num_bytes)} of {size_text(self.num_all_bytes)} are active"
        )


def active_part(outline: ModelConfig, low_bits: Storage | None) -> Active | None:
    """Return the part that a token reads; None without experts.

    `low_bits`: the storage of weights in few bits, if there are any.
    """
    values = text_values(outline.config)
    values.update(values.get("ffn_config") or {})  # DBRX
    num_experts, num_chosen = _number(values, _NUM_EXPERTS), _number(values, _NUM_CHOSEN)
    layers = [each for each in outline.empty.modules() if is_experts(each)]
    if num_experts is None or num_chosen is None or not layers or num_chosen > num_experts:
        return None
    num_all = outline.num_parameters()
    num_routed = sum(each.numel() for layer in layers for each in layer.parameters())
    floats = num_all * outline.dtype.itemsize, num_routed * outline.dtype.itemsize
    all_bytes, routed_bytes = floats
    if low_bits is not None:
        all_bytes = low_bits.num_bytes
        routed_bytes = low_bits.expert_bytes or routed_bytes
    num_idle = num_experts - num_chosen
    return Active(
        num_chosen,
        num_experts,
        num_all - num_routed * num_idle // num_experts,
        num_all,
        all_bytes - routed_bytes * num_idle // num_experts,
        all_bytes,
    )


def active_lines(active: Active | None, device_type: str) -> list[str]:
    """Return the lines about the active part, and on a CPU about the rate that it allows."""
    if active is None:
        return []
    lines = [f"experts          {active}"]
    if device_type == "cpu":
        lines.append(f"memory speed     {_rate_text(active.num_bytes)}")
    return lines


def _number(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    found = (values.get(name) for name in names)
    return next((each for each in found if type(each) is int and each > 0), None)


def _read_rate(num_threads: int) -> float:
    """Measure the bytes that threads read from memory in a second, together.

    It takes a third of a second: numpy sums an array that no cache holds, and the best of three
    counts.
    """
    import numpy as np  # noqa: PLC0415  # only mixtures need it here

    numbers = np.ones(_RATE_BYTES // 8, np.int64)
    shares = np.array_split(numbers, num_threads)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_RATE_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.sum, shares))  # without the GIL
            best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best


def _rate_text(num_bytes: int) -> str:
    """Return the tokens a second of one sequence, if each reads so many bytes of weights."""
    num_threads = len(os.sched_getaffinity(0))
    rate = _read_rate(num_threads)
    return (
        f"{rate / 1e9:.3g} GB/s read by {num_threads} thread{'s' * (num_threads > 1)}, so at most "
        f"{rate / num_bytes:,.3g} tokens/s for one sequence without drafts"
    )
