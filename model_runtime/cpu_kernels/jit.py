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
from numba.core.dispatcher import Dispatcher
from numba.extending import _Intrinsic

SOURCES = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != "__init__.py")

Function = TypeVar("Function", bound=Callable[..., Any])


def fingerprint() -> str:
    """What all sources of the kernels hold, as a hash."""
    found = hashlib.sha256()
    for path in SOURCES:
        found.update(path.read_bytes())
    return found.hexdigest()


_FINGERPRINT = fingerprint()


def _variant(function: Callable[..., Any]) -> str:
    """What a function takes from around it, as text; empty where that is nothing.

    The same in every process, which numba's own hash of it is not where a kernel is among it.
    """
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return ",".join(map(_described, cells))


def _described(thing: Any) -> str:
    if isinstance(thing, Dispatcher):
        return f"{thing.py_func.__module__}.{thing.py_func.__qualname__}"  # its own variant in it
    if isinstance(thing, _Intrinsic):
        return thing._name  # type: ignore[no-any-return]  # noqa: SLF001
    if isinstance(thing, int | str | type):
        return repr(thing)
    raise TypeError(f"a kernel takes {thing!r} from around it, which has no name for the cache")


class KeptCode(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, stale when any source of the kernels has changed."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """With the function's own code, for one outside SOURCES; its name tells variants apart."""
        code = hashlib.sha256(self._py_func.__code__.co_code).hexdigest()
        return sig, codegen.magic_tuple(), code

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            self.cache_path, self._impl.filename_base, _FINGERPRINT
        )


def jit(*, inline: bool = False, borrows: bool = False) -> Callable[[Function], Function]:
    """A decorator that compiles; products and sums may fuse, and NaN stays NaN.

    `inline`: worth it for what is called for each row, since an array is handed over as nine
    arguments; compiling takes longer. `borrows`: for what neither makes nor returns an array, and
    is called often: who refers to the arrays that it is handed is not counted, which takes two
    atomic instructions each.
    """

    def compiled(function: Function) -> Function:
        variant = _variant(function)
        if variant:
            # Names of symbols come from it too: two variants of one name in two files of the
            # cache, made by two processes, would be taken for the same code.
            function.__qualname__ += f"_{hashlib.sha256(variant.encode()).hexdigest()[:12]}"
        made: Any = numba.njit(
            nogil=True,
            fastmath={"contract"},
            error_model="numpy",
            forceinline=inline,
            _nrt=not borrows,
        )(function)
        made._cache = KeptCode(made.py_func)  # noqa: SLF001  # as its enable_caching does
        result: Function = made
        return result

    return compiled
