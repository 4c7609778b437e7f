"""Machine code that is kept across starts is never older than its sources."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.model_runtime.cpu_kernels import fused_decode
from ropewalk.model_runtime.cpu_kernels import jit as compiled
from ropewalk.model_runtime.cpu_kernels.attention.attention import attend, attend_in_pairs
from ropewalk.model_runtime.cpu_kernels.experts.products import ExpertProduct
from ropewalk.model_runtime.cpu_kernels.jit import SOURCES, jit
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import FLOAT32, IN_PAIRS, WIDENED

FOLDER = Path(compiled.__file__).parent


def test_every_source_of_the_kernels_counts() -> None:
    """Every file that imports numba or llvmlite, or uses `@jit`, is in the kernels' folder.

    Triton's kernels have a decorator of that name, too.
    """
    for path in FOLDER.parent.rglob("*.py"):
        if "gpu" in path.parts:
            continue
        is_source = re.search(
            r"^(import|from) (numba|llvmlite)|^ *@jit\(", path.read_text(), re.MULTILINE
        )
        assert not is_source or path in SOURCES, path.name
    assert len(SOURCES) > 10


def test_code_is_kept_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is discarded if any source file changes, not only the function's own."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    def hits() -> int:
        def doubled(x: float) -> float:
            return 2 * x

        function = jit()(doubled)
        assert function(np.float32(4.0)) == 8.0
        return sum(function.stats.cache_hits.values())  # type: ignore[attr-defined]

    assert hits() == 0
    assert hits() == 1
    monkeypatch.setattr(compiled, "_FINGERPRINT", "another")
    assert hits() == 0
    assert hits() == 1


@pytest.mark.long
def test_kernels_made_of_kernels_are_found_again_by_another_process(tmp_path: Path) -> None:
    """Numba's own cache key of such kernels differs between processes."""
    code = (
        "import numpy as np; from ropewalk.model_runtime.cpu_kernels.skinny_gemm import FLOAT32;"
        "multiply = FLOAT32.multiply;"
        "row, none = np.ones((1, 64), np.float32), np.empty(0, np.float32);"
        "multiply(row, np.ones(64 * 64, np.float32), none, np.empty_like(row), 64, 64, 0, 1);"
        "print(sum(multiply.stats.cache_hits.values()))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=FOLDER.parents[1],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "1"]


def test_variants_of_a_kernel_have_names_of_their_own() -> None:
    """Symbols and cache files of kernels are found by the names of the variants."""
    kernels: list[Any] = [attend, attend_in_pairs, FLOAT32.multiply, IN_PAIRS.multiply]
    kernels += [
        fused_decode.runner_for(multiplying, access, experts)
        for multiplying in (FLOAT32, WIDENED, IN_PAIRS)
        for access in (fused_decode.EXACT_ACCESS, fused_decode.PAIRS_ACCESS)
        for experts in (None, ExpertProduct(FLOAT32.multiply), ExpertProduct(IN_PAIRS.multiply))
    ]
    assert len({kernel.py_func.__qualname__ for kernel in kernels}) == len(kernels)
