"""numba's compiler as the kernels use it; what it compiled is kept across starts.

numba keeps machine code beside the file of a function, and compiles again when that file changes.
A kernel is inlined from several: here all of them count.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

SOURCES = (
    "attention_block",
    "attention_kernel",
    "attention_page",
    "bfloat16",
    "compiled",
    "gated_mlp",
    "lane_tiles",
    "lanes",
    "row_norm",
    "row_products",
)

Function = TypeVar("Function", bound=Callable[..., Any])


def fingerprint() -> str:
    """What all sources of the kernels hold, as a hash."""
    found = hashlib.sha256()
    for name in SOURCES:
        found.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return found.hexdigest()


_FINGERPRINT = fingerprint()


class KeptCode(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, stale when any source of the kernels has changed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            self.cache_path, self._impl.filename_base, _FINGERPRINT
        )


def jit(*, inline: bool = False, reorder: bool = False) -> Callable[[Function], Function]:
    """A decorator that compiles; products and sums may fuse, and NaN stays NaN.

    `inline`: worth it for what is called for each row, since an array is handed over as nine
    arguments; compiling takes longer. `reorder`: sums may be reordered, once for all calls.
    """
    fastmath = {"contract", "reassoc"} if reorder else {"contract"}

    def compiled(function: Function) -> Function:
        made: Any = numba.njit(
            nogil=True, fastmath=fastmath, error_model="numpy", forceinline=inline
        )(function)
        made._cache = KeptCode(made.py_func)  # noqa: SLF001  # as its enable_caching does
        result: Function = made
        return result

    return compiled
