"""Kernels inside of kernels are linked into their callers or called, and kept for the next one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.model_runtime.cpu_kernels.jit import jit


def kernels(name: str, *, apart: bool = False) -> tuple[Any, Any]:
    """A new kernel and one that calls it, with and without a constant; the name is the caller's."""

    @jit(apart=apart)
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


def through(kernel: Any, name: str) -> Any:
    """A caller of this name, with another kernel between it and the called one."""

    @jit()
    def between(x: Any, factor: int) -> float:
        return float(kernel(x, factor))

    def calling(x: Any, factor: int) -> float:
        return between(x, factor) + between(x, 2)

    calling.__qualname__ = name
    return jit()(calling)


def test_a_kernel_apart_is_compiled_once_for_all_callers(folder: Path) -> None:
    """A caller that was kept, and one over kept code, find the machine code before they run."""
    scaled, calling = kernels("calling", apart=True)
    assert calling(X, 2) == 50.0
    assert through(scaled, "through")(X, 1) == 30.0
    assert scaled(X, 7) == 70.0
    assert len(scaled.overloads) == 1
    assert not [*folder.rglob("*scaled*.inlined.*.nbc")]
    scaled, calling = kernels("calling", apart=True)
    assert calling(X, 3) == 60.0
    assert through(scaled, "through")(X, 3) == 50.0
    assert through(scaled, "new")(X, 3) == 50.0
    assert sum(scaled.stats.cache_hits.values()) == 1
    assert not scaled.stats.cache_misses
    assert calling.stats.cache_hits


@pytest.mark.usefixtures("folder")
def test_kernels_of_one_name_that_compute_otherwise_have_symbols_of_their_own() -> None:
    """Two variants in one process, each compiled apart."""

    def made(factor: int) -> Any:
        @jit(apart=True)
        def scaled(x: Any) -> float:
            return float(x.sum() * factor)

        @jit()
        def calling(x: Any) -> float:
            return scaled(x) + 1

        return calling

    assert [made(factor)(X) for factor in (2, 3)] == [21.0, 31.0]


@pytest.mark.parametrize("apart", [False, True])
def test_an_error_of_an_inner_kernel_reaches_python(folder: Path, *, apart: bool) -> None:
    """Also from code that an earlier process kept."""
    for _ in range(2):

        @jit(apart=apart)
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
