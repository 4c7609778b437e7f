"""Times the host's part of launches: `python -m tests.launch_times`, without a GPU.

Kernels are those of a mixed step's layer in Llama 3 8B's shape, and of a draw. Nothing is compiled
or run, so what Triton's compiled launcher and the driver take comes on top in both columns.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ropewalk.model_runtime.gpu.launch import Kernel
from tests.compilations import Uncompiled
from tests.gpu_targets import CASES, Device
from tests.oracles.attention_cases import Laid

_ROUNDS, _LAUNCHES = 7, 500
_LINE = "{:<12} {:>9} {:>12} {:>9} {:>7}\n"


class Launches:
    """Keeps each kernel's last launch, with what it is launched with."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Kernel, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {}
        self.served = Kernel.__getitem__
        Kernel.__getitem__ = lambda kernel, grid: partial(self._launch, kernel, grid)

    def _launch(self, kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        self.kept[kernel.__name__] = kernel, grid, args, named
        self.served(kernel, grid)(*args, **named)


def microseconds(launch: Callable[[], object]) -> float:
    """The median of several rounds, each of many launches."""
    rounds = []
    for _ in range(_ROUNDS):
        began = perf_counter()
        for _ in range(_LAUNCHES):
            launch()
        rounds.append((perf_counter() - began) / _LAUNCHES * 1e6)
        Uncompiled.launched.clear()
    return statistics.median(rounds)


def main() -> None:
    """Print a line for each kernel: microseconds by Triton, and as it is served."""
    from ropewalk.model_runtime.gpu import flash
    from ropewalk.model_runtime.gpu.backend import TritonAttention
    from ropewalk.model_runtime.gpu.gate import Activation, gate_into
    from ropewalk.model_runtime.gpu.rms_norm import Scale, normalize_into
    from ropewalk.model_runtime.gpu.sampling.draw_ranked import CUTS, draw_rows

    driver.set_active(Device(90))
    JITFunction._do_compile = lambda self, key, *_, **__: self.device_caches[0][0].setdefault(
        key, Uncompiled(0)
    )
    launches = Launches()
    flash.is_available = lambda _: True
    flash.flash = lambda query, *_: (torch.empty_like(query), torch.empty(query.shape[1::-1]))
    laid = Laid(CASES["as served"], torch.device("cpu"))
    key_TKD = torch.zeros(len(laid.read.query_THD), 8, 128, dtype=torch.bfloat16)
    attention = TritonAttention(laid.batch)
    attention.write(laid.read.keys_NKDO, laid.read.values_NKOV, key_TKD, key_TKD)
    attention.read(laid.read)
    x = torch.zeros(64, 4096, dtype=torch.bfloat16)
    scale = Scale(x[0], 1e-5, plus_one=False)
    normalize_into(x, scale, x, residual_RC=x, summed_RC=x)
    joined = torch.zeros(64, 2 * 14_336, dtype=torch.bfloat16)
    gate_into(joined, torch.empty(64, 14_336, dtype=torch.bfloat16), Activation.SILU)
    logits_RV = torch.zeros(64, 128_256)
    cuts_RC = torch.zeros(64, CUTS, dtype=torch.float64)
    draw_rows(logits_RV, cuts_RC, logits_RV, (True, True, True))
    sys.stdout.write(_LINE.format("kernel", "arguments", "Triton, us", "here, us", "ratio"))
    for name, (kernel, grid, args, named) in launches.kept.items():
        before, here = (
            microseconds(lambda way=way: way(kernel, grid)(*args, **named))  # noqa: B023
            for way in (JITFunction.__getitem__, launches.served)
        )
        numbers = f"{before:.1f}", f"{here:.1f}", f"{here / before:.2f}"
        sys.stdout.write(_LINE.format(name, len(args) + len(named), *numbers))


if __name__ == "__main__":
    main()
