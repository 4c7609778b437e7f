"""The processor that numba compiles for: the width and the number of its vector registers.

Kernels follow the target of the compiler, which is not always the machine's own processor:
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES can select an older one. CONTRIBUTING.md describes such
tests.
"""

from functools import cache
from typing import NamedTuple

from llvmlite import binding
from numba.core import config
from numba.core.codegen import get_host_cpu_features


class Vectors(NamedTuple):
    """The vector registers of a processor."""

    name: str  # of the instruction set, for the banner
    lanes: int  # float32 values in one register
    num_registers: int
    has_fma: bool  # an instruction multiplies and adds with one rounding


@cache
def target_features() -> frozenset[str]:
    """Return LLVM's names of the target's features, such as avx2 and fma."""
    text = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return frozenset(each[1:] for each in text.split(",") if each.startswith("+"))


@cache
def vectors() -> Vectors:
    """Return the vector registers of the target; the narrowest kind if no feature is known."""
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
