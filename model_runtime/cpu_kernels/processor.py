"""The processor that numba compiles for: the width and the number of its vector registers.

Kernels follow the target of the compiler, which is not always the machine: NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES let one processor play an older one, and CONTRIBUTING.md says how to test so.
"""

from functools import cache
from typing import NamedTuple

from llvmlite import binding
from numba.core import config
from numba.core.codegen import get_host_cpu_features


class Vectors(NamedTuple):
    """Vector registers of a processor."""

    name: str  # of the instructions, as the banner says it
    lanes: int  # float32 numbers in one register
    num_registers: int
    has_fma: bool  # multiplies and adds with one rounding


@cache
def target_features() -> frozenset[str]:
    """LLVM's names of what the target has, such as avx2 and fma."""
    text = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(each[1:] for each in text.split(",") if each.startswith("+"))


@cache
def vectors() -> Vectors:
    """The registers of the target; the narrowest of its kind where nothing is known."""
    features = target_features()
    architecture = binding.get_process_triple().partition("-")[0]
    if architecture in {"aarch64", "arm64"}:
        return Vectors("NEON", 4, 32, has_fma=True)
    has_fma = "fma" in features
    if "avx512f" in features and "avx512vl" in features:
        return Vectors("AVX-512", 16, 32, has_fma=True)
    if "avx2" in features:
        return Vectors("AVX2", 8, 16, has_fma)
    if "avx" in features:
        return Vectors("AVX", 8, 16, has_fma)
    name = "SSE" if architecture == "x86_64" else architecture
    return Vectors(name, 4, 16, has_fma)
