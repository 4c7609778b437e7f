"""Compilation and launch of the GPU's kernels. Importing this file imports triton.

Triton's own launch takes 38 microseconds of the host for a kernel with 34 arguments, beside an H200
(benchmarks/gpu.md). It reads hooks and options and the kind of each argument, and asks the driver
about each pointer. A kernel here is launched by Triton once for each kind of arguments, and without
it from then on.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, overload

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNED = 16  # bytes of an address, and the number that Triton knows integers to be multiples of
_MOST_INT = 2**31 - 1  # of a kernel's int32
_ADDRESS = Tensor.data_ptr


@overload
def jit(function: Callable[..., Any], /) -> Any: ...


@overload
def jit(*by_request: str) -> Callable[[Callable[..., Any]], Any]: ...


def jit(*by_request: Any) -> Any:
    """Compile for the GPU; use Triton's interpreter if TRITON_INTERPRET was set before.

    `@jit("num_keys", "page_table")` names the arguments that change from request to request. By
    default, Triton compiles a kernel again for every kind of integer (1, multiples of 16, others)
    and of address (multiples of 16 bytes or not). All requests would wait for it. Named arguments
    have one kind. Others keep theirs, because aligned rows of keys are loaded in fewer
    instructions. `@jit` alone names none. Raises ValueError for a name that the kernel lacks.
    """
    if len(by_request) == 1 and callable(by_request[0]):
        return _kernel(by_request[0], ())

    def compiled(function: Callable[..., Any]) -> Any:
        lacking = set(by_request) - set(inspect.signature(function).parameters)
        if lacking:
            raise ValueError(f"{function.__name__} has no argument {sorted(lacking)}")
        return _kernel(function, by_request)

    return compiled


def _kernel(function: Callable[..., Any], by_request: tuple[str, ...]) -> Any:
    named = {"do_not_specialize": by_request, "do_not_specialize_on_alignment": by_request}
    return triton.jit(function, **named) if is_interpreted() else Kernel(function, **named)


def is_interpreted() -> bool:
    """Return whether kernels run in the interpreter, which has no products of bfloat16."""
    return bool(triton.knobs.runtime.interpret)


def _let_interpreter_count() -> None:
    """Make `range` work in Triton 3.6's interpreter with numpy 2.5 and later.

    The interpreter converts a numpy array [1] to an int, which numpy refuses from 2.5 on. Triton's
    compiler does not do so, and Triton 3.7 converts in another way.
    """
    from triton.runtime import interpreter  # noqa: PLC0415  # nothing that a GPU needs

    patch_tensor = interpreter._patch_lang_tensor  # noqa: SLF001  # sets it anew for every launch

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch  # noqa: SLF001


if is_interpreted() and triton.__version__.startswith("3.6."):
    _let_interpreter_count()


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a kernel's arguments by position have what. The types are those of the first launch."""

    pointers: tuple[int, ...]  # those whose alignment counts come first
    num_aligned: int
    integers: tuple[int, ...]  # those whose kind counts come first
    num_kinds: int
    constants: tuple[int, ...]  # known at compile time

    @classmethod
    def of(cls, kernel: JITFunction, args: tuple[Any, ...]) -> "_Places":
        """Return the places of a kernel's arguments; a float has one kind."""
        places: dict[str, list[int]] = {}
        for at, (parameter, arg) in enumerate(zip(kernel.params, args, strict=False)):
            if parameter.is_constexpr:
                kind = "constant"
            elif isinstance(arg, Tensor):
                kind = "pointer" if parameter.do_not_specialize_on_alignment else "aligned"
            elif isinstance(arg, int):
                kind = "integer" if parameter.do_not_specialize else "kind"
            else:
                kind = "float"
            places.setdefault(kind, []).append(at)
        aligned, kinds = places.get("aligned", []), places.get("kind", [])
        return cls(
            (*aligned, *places.get("pointer", [])),
            len(aligned),
            (*kinds, *places.get("integer", [])),
            len(kinds),
            tuple(places.get("constant", [])),
        )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A kernel that is loaded on a device, and its constants behind the arguments by position."""

    run: Callable[..., None]
    function: int
    metadata: Any
    tail: tuple[Any, ...]


class Kernel(JITFunction):  # type: ignore[misc]  # triton has no types
    """A kernel of Triton, `kernel[grid](*args, **constants)`, launched without Triton's Python.

    Arguments by name are compile-time constants and options. An argument has one type in all
    launches, except that tensors may have any dtype. Hooks of Triton's profiler see the first
    launch of a kind only.
    """

    def __init__(self, function: Callable[..., Any], **named: Any) -> None:
        super().__init__(function, **named)
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}  # by the kinds of all arguments
        self._places: _Places | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        places = self._places
        if places is None:
            places = self._places = _Places.of(self, args)
        tensors = [args[at] for at in places.pointers]
        pointers = [*map(_ADDRESS, tensors)]
        integers = [args[at] for at in places.integers]
        active = driver.active
        device = active.get_current_device()
        key = (
            device,
            *constants,
            *constants.values(),
            *[args[at] for at in places.constants],
            *[
                _ALIGNED if not each % _ALIGNED else each == 1
                for each in integers[: places.num_kinds]
            ],
            *[each.dtype for each in tensors],
        )
        is_usual = (
            reduce(or_, pointers[: places.num_aligned], 0) % _ALIGNED == 0
            and max(integers, default=0) <= _MOST_INT
        )
        compiled = self._compiled.get(key) if is_usual else None
        if compiled is None:
            kernel = self.run(*args, grid=grid, warmup=False, **constants)
            if is_usual and isinstance(kernel, CompiledKernel):
                rest = self.params[len(args) :]
                tail = tuple(constants.get(each.name, each.default) for each in rest)
                self._compiled[key] = _Compiled(
                    kernel.run, kernel.function, kernel.packed_metadata, tail
                )
            return
        given = [*args]
        for at, pointer in zip(places.pointers, pointers, strict=True):
            given[at] = pointer  # a number, which the driver is not asked about
        compiled.run(
            *(*grid, 1, 1)[:3], active.get_current_stream(device),
            compiled.function, compiled.metadata, None, None, None, *given, *compiled.tail,
        )  # fmt: skip
