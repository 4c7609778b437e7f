"""A trial of the compiled kernels: a processor or a release of numba may not bear them."""

from functools import cache
from typing import Any

import numpy as np

from model_runtime.compiled import jit
from model_runtime.lanes import WIDTH, add, exp, fma, load, spread, store, total


@jit()
def _trial(numbers: Any, out: Any) -> Any:
    lanes = load(numbers, 0)
    store(out, 0, fma(lanes, spread(np.float32(2.0)), exp(lanes)))
    return total(add(lanes, lanes))


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
