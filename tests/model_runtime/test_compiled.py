"""Machine code that is kept across starts is never older than its sources."""

import re
from pathlib import Path

import numpy as np
import pytest

from model_runtime import compiled
from model_runtime.compiled import SOURCES, jit

FOLDER = Path(compiled.__file__).parent


def test_every_source_of_the_kernels_counts() -> None:
    """what imports numba, llvmlite or one that does, and is itself compiled"""
    for path in FOLDER.glob("*.py"):
        is_source = re.search(
            r"^(import|from) (numba|llvmlite)|^ *@jit\(", path.read_text(), re.MULTILINE
        )
        assert bool(is_source) == (path.stem in SOURCES), path.name


def test_code_is_kept_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """of any file, not only of the function's own"""
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
