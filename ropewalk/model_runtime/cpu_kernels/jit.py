"""numba's compiler as the kernels use it, with a cache of machine code that outlives the process.

numba keeps machine code beside the file of a function, and compiles again if that file changes. A
kernel is inlined from several files, so here a change of any of them makes the code stale.

The cache is an optimisation: a full disk, a read-only folder or a damaged file costs time, and a
warning, but never a start.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import structlog
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.extending import _Intrinsic

from ropewalk.model_runtime.cpu_kernels.inlined import KeptBitcode, split

_COST = "each start compiles the kernels, which takes half a minute or more"
_REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written and has 20 MB free"

# LLVM's third level takes an eighth more time for these kernels, and they run no faster, because
# their vectors and unrolled loops are written out. numba has a variable for it, and no argument.
os.environ.setdefault("NUMBA_OPT", "2")
numba.config.reload_config()

_log = structlog.get_logger(__name__)
_NOT_KEPT = "kernels_not_kept"
_kept: set[str] = set()  # files of compiled code that this process has written
_told: set[str] = set()  # warnings of this process, because every kernel has the same problem

SOURCES = sorted(path for path in Path(__file__).parent.rglob("*.py") if path.name != "__init__.py")

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
    return ",".join(map(described, cells))


def described(thing: Any) -> str:
    """Return a text that tells apart what a kernel takes from around it. Raises TypeError."""
    if isinstance(thing, Dispatcher):
        kernel = thing.py_func
        # The kernel's own variant is a part of its name.
        return f"{kernel.__module__}.{kernel.__qualname__}:{_code_hash(kernel)[:12]}"
    if isinstance(thing, _Intrinsic):
        return thing._name  # type: ignore[no-any-return]  # noqa: SLF001
    if isinstance(thing, int | str | type):
        return repr(thing)
    raise TypeError(f"a kernel takes {thing!r} from around it, which has no name for the cache")


def _code_hash(function: Callable[..., Any]) -> str:
    code = function.__code__
    numbers = [each for each in code.co_consts if isinstance(each, int | float | str)]
    return hashlib.sha256(code.co_code + repr((numbers, code.co_names)).encode()).hexdigest()


def _warn_once(event: str, **facts: str) -> None:
    if event not in _told:
        _told.add(event)
        _log.warning(event, **facts)


class _DamagedError(Exception):
    """A file of machine code that is not what its writer wrote."""


class _KeptFiles(IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function: an index, and machine code under a seal for each signature.

    The seal is a hash of code, key and fingerprint. A disk that fills up between the two writes
    leaves a new index beside an old file of code. Without a seal, the next start would run it.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write code, and the index if the key is new. Raises OSError."""
        self._mark = self._mark_of(key)
        super().save(key, data)

    def load(self, key: Any) -> Any:
        """Return what was saved, or None. Raises errors of any type for a damaged file."""
        self._mark = self._mark_of(key)
        return super().load(key)

    def _mark_of(self, key: Any) -> bytes:
        return repr((self._source_stamp, self._version, key)).encode()

    def _seal(self, code: bytes) -> bytes:
        return hashlib.sha256(self._mark + code).digest()

    def _load_index(self) -> Any:
        """Return the index. It is empty if its file is damaged, so that the next save renews it."""
        try:
            return super()._load_index()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # unpickling raises any type
            _warn_damaged(self._index_path, error)
            return {}

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)
        path = self._data_path(name)
        with self._open_for_write(path) as file:
            file.write(code + self._seal(code))
        _kept.add(path)

    def _load_data(self, name: str) -> Any:
        kept = Path(self._data_path(name)).read_bytes()
        size = len(kept) - hashlib.sha256().digest_size
        if size < 0 or kept[size:] != self._seal(kept[:size]):
            raise _DamagedError(f"{name} is not what was written")
        return super()._load_data(name)  # unpickling ends before the seal


def _warn_damaged(where: str, error: Exception) -> None:
    _warn_once(
        "kernel_cache_damaged",
        where=where,
        reason=f"{type(error).__name__}: {error}",
        consequence="the kernel is compiled again",
    )


class KeptCode(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, stale when any source of the kernels has changed.

    A fault of the cache is a warning. The kernel is then compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _KeptFiles(self.cache_path, self._impl.filename_base, _FINGERPRINT)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the kept code; None if there is none, or if it cannot be used."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001  # unpickling and LLVM raise any type
            _warn_damaged(self.cache_path, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep code for the next start, if the folder takes it."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(
                _NOT_KEPT,
                folder=self.cache_path,
                reason=str(error.strerror),
                consequence=_COST,
                remedy=_REMEDY,
            )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return the key, with the function's own code for a function outside SOURCES.

        The function's name tells its variants apart.
        """
        return sig, codegen.magic_tuple(), _code_hash(self._py_func)


def num_kept() -> int:
    """Return how many kernels this process has kept as files; 0 if a folder has refused any."""
    return 0 if _NOT_KEPT in _told else len(_kept)


class _KeptInner(KeptCode):
    _impl_class = KeptBitcode


def _cache_of(function: Callable[..., Any], kind: type[KeptCode]) -> KeptCode | None:
    """Return a function's cache; None if numba finds no folder that it can write."""
    try:
        made = kind(function)
    except RuntimeError as error:
        # numba's words for this: "cannot cache function ...: no locator available for file ...".
        if "locator" not in str(error):
            raise
        _warn_once(
            _NOT_KEPT,
            folder=numba.config.CACHE_DIR or "__pycache__",
            reason="no folder can be written",
            consequence=_COST,
            remedy=_REMEDY,
        )
        return None
    wanted = numba.config.CACHE_DIR
    if wanted and not Path(made.cache_path).is_relative_to(wanted):
        _warn_once(
            "kernel_cache_elsewhere",
            NUMBA_CACHE_DIR=wanted,
            reason=_why_not(Path(wanted)),
            folder=made.cache_path,
        )
    return made


def _why_not(folder: Path) -> str:
    """Return why numba does not use a folder, in the system's words."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return str(error.strerror)
    return "it could not be written"


def jit(
    *, inline: bool = False, borrows: bool = False, fuses: bool = True, apart: bool = False
) -> Callable[[Function], Function]:
    """Return a decorator that compiles; NaN stays NaN.

    If `fuses`, products and sums may become one operation with one rounding, where a processor has
    it. Intrinsics count as a part of the function that calls them.

    `inline` pays for a function that is called for each row, because an array is passed as nine
    arguments. It makes compiling longer. `borrows` is for a function that is called often and
    neither makes nor returns an array. It skips reference counting of the array arguments, which
    takes two atomic instructions per array.

    `apart` is for a large kernel that several others call. It is compiled once, and not with each
    of them; `inlined.py`. A call then passes each array by its nine numbers.

    A kernel copies an array in a loop. `out[:] = row` compiles the text of numba's error, with all
    of its strings, which takes four seconds.
    """

    def compiled(function: Function) -> Function:
        variant = _variant(function)
        if variant:
            # The names of symbols come from it too. Without it, two variants of one name from two
            # processes would be taken for the same code.
            function.__qualname__ += f"_{hashlib.sha256(variant.encode()).hexdigest()[:12]}"
        kernel = numba.njit(
            nogil=True,
            fastmath={"contract"} if fuses else False,
            error_model="numpy",
            forceinline=inline,
            _nrt=not borrows,
            no_cfunc_wrapper=True,
        )
        entry: Any = kernel(function)
        inner: Any = kernel(function)
        split(entry, inner, described(entry) if apart else "")
        kinds: list[tuple[Any, type[KeptCode]]] = [(entry, KeptCode)]
        if not apart:  # else the machine code is the entry's
            kinds.append((inner, _KeptInner))
        for made, kind in kinds:
            kept = _cache_of(made.py_func, kind)
            if kept is not None:
                made._cache = kept  # noqa: SLF001  # as its enable_caching does
        result: Function = entry
        return result

    return compiled
