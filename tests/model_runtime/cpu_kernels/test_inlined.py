"""Kernels inside of kernels are linked into their callers, and kept for the next caller."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.model_runtime.cpu_kernels.jit import jit


def kernels(name: str) -> tuple[Any, Any]:
    """A new kernel and one that calls it, with and without a constant; the name is the caller's."""

    @jit()
    def scaled(x: Any, factor: int) -> float:
        return float(factor * x.sum())

    def calling(x: Any, factor: int) -> float:
        return scaled(x, factor) + scaled(x, 3)

    calling.__qualname__ = name
    return scaled, jit()(calling)


def inner(kernel: Any) -> Any:
    """The dispatcher that compiled callers use."""
    return kernel.get_overload.__self__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a test's kernels are kept."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return tmp_path


X = np.arange(5, dtype=np.float32)  # its sum is 10


@pytest.mark.usefixtures("folder")
def test_a_constant_makes_no_variant_of_an_inner_kernel() -> None:
    scaled, calling = kernels("calling")
    assert calling(X, 2) == 50.0
    assert len(inner(scaled).overloads) == 1


@pytest.mark.usefixtures("folder")
def test_an_inner_kernel_has_no_machine_code_until_python_calls_it() -> None:
    scaled, calling = kernels("calling")
    assert calling(X, 2) == 50.0
    assert not scaled.overloads
    [made] = inner(scaled).overloads.values()
    assert made.library.get_pointer_to_function(made.fndesc.llvm_func_name) == 0
    assert scaled(X, 7) == 70.0
    assert calling(X, 1) == 40.0


def test_an_inner_kernel_is_found_again_for_another_caller(folder: Path) -> None:
    first, calling = kernels("calling")
    assert calling(X, 2) == 50.0
    assert len([*folder.rglob("*.inlined.*.nbc")]) == 1
    assert sum(inner(first).stats.cache_misses.values()) == 1
    again, another = kernels("another")
    assert another(X, 2) == 50.0
    assert sum(inner(again).stats.cache_hits.values()) == 1
    assert not inner(again).stats.cache_misses
    assert sum(another.stats.cache_misses.values()) == 1


def test_an_error_of_an_inner_kernel_reaches_python(folder: Path) -> None:
    """Also from code that an earlier process kept."""
    for _ in range(2):

        @jit()
        def checked(x: Any) -> int:
            if x.size > 4:
                raise ValueError("too long")
            return int(x.size)

        @jit()
        def calling(x: Any) -> int:
            return checked(x) + 1

        assert calling(X[:2]) == 3
        with pytest.raises(ValueError, match="too long"):
            calling(X)
    assert [*folder.rglob("*.nbc")]
