"""Trials of the kernels on this processor: do they work, and which of two is faster."""

import math
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ropewalk.model_runtime.cpu_kernels.attention.bf16_dot import HAS_PAIR_PRODUCTS
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    exp,
    fma,
    load,
    reduce_add,
    store,
)
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (
    IN_PAIRS,
    MOST_ROWS,
    PANEL,
    WIDENED,
    Panels,
    RowProducts,
)
from ropewalk.model_runtime.known_trials import remembered

CLEARLY = 1.15  # times faster; a smaller difference may be noise
_TIMES = 9  # repetitions of each trial; the shortest counts
_NUM_INPUTS = 1024  # of the panel by which pairs are timed; it stays in the level-2 cache
_ONE = 0x3F80  # 1.0 in bfloat16; values below 2^-126 would slow one of the two down


@cache
def pairs_pay() -> bool:
    """Return whether multiplying bfloat16 in pairs is faster on this processor.

    On some processors the instruction takes as long as a float32 product, and on others four times
    as long. The first process on a machine tries it, and the others choose as that one did.
    """
    if not HAS_PAIR_PRODUCTS:
        return False
    return remembered("pairs of bfloat16", _are_pairs_faster) is True


def _are_pairs_faster() -> bool:
    x_RK = np.full((MOST_ROWS, _NUM_INPUTS), _ONE, np.uint16)
    packed_Q = np.full(_NUM_INPUTS * PANEL, _ONE, np.uint16)
    panels = Panels(packed_Q, _NUM_INPUTS, PANEL, _NUM_INPUTS, None)
    singly, in_pairs = shortest(
        *(
            partial(RowProducts(panels, _NUM_INPUTS, multiplying).multiply, x_RK)
            for multiplying in (WIDENED, IN_PAIRS)
        )
    )
    return in_pairs * CLEARLY < singly


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Return whether rows of a number type are multiplied in pairs by weights of few bits."""
    return dtype == torch.bfloat16 and pairs_pay()


def shortest(*works: Callable[[], object]) -> list[float]:
    """Return the shortest of several times of each callable, in seconds; the calls alternate.

    The first call of each does not count, because it may compile.
    """
    times = [[math.inf] for _ in works]
    for attempt in range(_TIMES + 1):
        for work, found in zip(works, times, strict=True):
            begin = time.perf_counter()
            work()
            if attempt:
                found.append(time.perf_counter() - begin)
    return [min(found) for found in times]


@jit()
def _trial(numbers: Any, out: Any) -> Any:
    lanes = load(numbers, 0)
    store(out, 0, fma(lanes, broadcast(np.float32(2.0)), exp(lanes)))
    return reduce_add(add(lanes, lanes))


@cache
def kernel_fault() -> str | None:
    """Return why compiled kernels cannot be used here, in one line; None if they can."""
    numbers, out = np.zeros(WIDTH, np.float32), np.empty(WIDTH, np.float32)
    try:
        summed = _trial(numbers, out)
    except Exception as error:  # noqa: BLE001  # numba and LLVM raise whatever they meet
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if summed != 0.0 or (out != 1.0).any():
        return "their results are wrong"
    return None
