"""numba's compiler as the kernels use it, with a cache of machine code that outlives the process.

numba keeps machine code beside the file of a function, and compiles again if that file changes. A
kernel is inlined from several files, so here a change of any of them makes the code stale.
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
    """Return a hash of all sources of the kernels."""
    found = hashlib.sha256()
    for path in SOURCES:
        found.update(path.read_bytes())
    return found.hexdigest()


_FINGERPRINT = fingerprint()


def _variant(function: Callable[..., Any]) -> str:
    """Return the variables that a function takes from its enclosing scope, as text; may be empty.

    The text is the same in every process. numba's own hash is not, if one variable is a kernel.
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
        """Return the key, with the function's own code for a function outside SOURCES.

        The function's name tells its variants apart.
        """
        code = hashlib.sha256(self._py_func.__code__.co_code).hexdigest()
        return sig, codegen.magic_tuple(), code

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            self.cache_path, self._impl.filename_base, _FINGERPRINT
        )


def jit(*, inline: bool = False, borrows: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that compiles; products and sums may fuse, and NaN stays NaN.

    `inline` pays for a function that is called for each row, because an array is passed as nine
    arguments. It makes compiling longer. `borrows` is for a function that is called often and
    neither makes nor returns an array. It skips reference counting of the array arguments, which
    takes two atomic instructions per array.
    """

    def compiled(function: Function) -> Function:
        variant = _variant(function)
        if variant:
            # The names of symbols come from it too. Without it, two variants of one name from two
            # processes would be taken for the same code.
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
