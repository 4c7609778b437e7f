"""Older processors that a newer one can play, by environment variables of three libraries.

`python -m tests.processors avx2 COMMAND...` runs a command so, as `make test ISA=avx2` does. With
`--if-newer` before the name it does nothing on a machine that has no more than AVX2.
"""

import os
import sys
from dataclasses import dataclass

from ropewalk.model_runtime.cpu_kernels.target import vectors

_V2 = "cx16 fxsr mmx popcnt sahf sse sse2 sse3 sse4.1 sse4.2 ssse3"
_V3 = "avx avx2 bmi bmi2 f16c fma fsgsbase invpcid lzcnt movbe pclmul rdrnd xsave xsaveopt"


@dataclass(frozen=True)
class Older:
    """A processor that a newer one can play, and the variables for it."""

    environment: dict[str, str]
    seen: str  # what torch and the kernels say they are compiled for
    isa: str  # what oneDNN says


def _older(onednn: str, torch: str, numba: str, features: str) -> dict[str, str]:
    return {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": torch,
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in features.split()),
    }


OLDER = {
    "avx2": Older(_older("AVX2", "avx2", "haswell", f"{_V2} {_V3}"), "AVX2 AVX2 8", "Intel AVX2"),
    "sse4.2": Older(_older("SSE41", "default", "nehalem", _V2), "DEFAULT SSE 4", "Intel SSE4.1"),
}

if __name__ == "__main__":
    _, *arguments = sys.argv
    if arguments[0] == "--if-newer":
        del arguments[0]
        if vectors().name != "AVX-512":
            sys.exit(0)
    name, *command = arguments
    os.environ.update(OLDER[name].environment)
    os.execvp(command[0], command)  # noqa: S606  # the tests' own command line
