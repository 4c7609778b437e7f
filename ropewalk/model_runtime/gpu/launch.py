"""Compilation and launch of the GPU's kernels. Importing this file imports triton.

Triton's own launch takes 38 microseconds of the host for a kernel with 34 arguments, beside an H200
(benchmarks/gpu.md). It reads hooks and options and the kind of each argument, and asks the driver
about each pointer. A kernel here is launched by Triton once for each kind of arguments, and without
it from then on.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_ALIGNED = 16  # bytes of an address, and the number that Triton knows integers to be multiples of
_MOST_INT = 2**31 - 1  # of a kernel's int32


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
    return Interpreted(function, **named) if is_interpreted() else Kernel(function, **named)


class Launches:
    """The launches of a block of code, which are repeated with other tensors.

    Layers of one kind differ in the tensors of their cache only, so the Python that finds a
    layer's grids and arguments runs once in a step. All tensors of the block are kept, so that
    their memory is not used for something else in between. A call of torch that computes is not
    seen, unless it is made by `whole`.
    """

    def __init__(self) -> None:
        self.can_repeat = True
        self._kept: list[tuple[Any, tuple[int, ...] | None, tuple[Any, ...], dict[str, Any]]] = []
        self._places: list[list[tuple[int, int]]] | None = None  # argument and tensor, by launch

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the launches of the block, which are made, too."""
        _noting.append(self)
        try:
            yield
        finally:
            _noting.pop()

    def note(self, kernel: Any, grid: tuple[int, ...] | None, *args: Any, **named: Any) -> None:
        """Launch and note a kernel, or a function without a grid."""
        self._kept.append((kernel, grid, args, named))
        _noting.remove(self)
        try:
            (kernel if grid is None else kernel[grid])(*args, **named)
        finally:
            _noting.append(self)

    def repeat(self, before: Sequence[Any], now: Sequence[Any]) -> None:
        """Launch all again with other tensors: those of `now` in the places of `before`."""
        if self._places is None:
            self._places = [
                [(at, which) for at, each in enumerate(args) for which, old in enumerate(before)
                 if each is old]
                for _, _, args, _ in self._kept
            ]  # fmt: skip
        for (kernel, grid, args, named), places in zip(self._kept, self._places, strict=True):
            given = list(args)
            for at, which in places:
                given[at] = now[which]
            (kernel if grid is None else kernel[grid])(*given, **named)


_noting: list[Launches] = []  # the innermost last; launches are made by one thread


def whole(function: Callable[..., None], *args: Any) -> None:
    """Call a function that computes by torch, as one of the launches that are noted."""
    if _noting:
        _noting[-1].note(function, None, *args)
    else:
        function(*args)


def never_repeat() -> None:
    """Let the block's launches be made by its own Python each time."""
    if _noting:
        _noting[-1].can_repeat = False


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


class Kernel(JITFunction):  # type: ignore[misc]  # triton has no types
    """A kernel of Triton, `kernel[grid](*args, **constants)`, launched without Triton's Python.

    An argument has one type in all launches, except that tensors may have any dtype. Hooks of
    Triton's profiler see the first launch of a kind only.
    """

    def __init__(self, function: Callable[..., Any], **named: Any) -> None:
        super().__init__(function, **named)
        self._direct: Callable[..., None] | None = None  # written at the first launch
        # The kinds of all arguments -> what launches the compiled kernel, and its handles.
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., None], int, Any]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if _noting:
            return partial(_noting[-1].note, self, grid)
        return partial(self._direct or self._first, grid)

    def _first(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Write the direct launch, which needs the types of the arguments, and launch by it."""
        own = {name: each for name, each in named.items() if name in self.arg_names}
        given = self.signature.bind(*args, **own).arguments
        names = {
            "_compiled": self._compiled,
            "_by_triton": self._by_triton,
            "_current_device": driver.active.get_current_device,
            "_current_stream": driver.active.get_current_stream,
            "_defaults": {each.name: each.default for each in self.params},
        }
        exec(_source(self.params, given), names)  # noqa: S102  # as Triton and dataclasses do
        self._direct = names["_launch"]
        self._direct(grid, *args, **named)

    def _by_triton(
        self, key: tuple[Any, ...] | None, grid: tuple[int, ...], given: dict[str, Any], /
    ) -> None:
        """Launch with all that Triton looks up, and keep what it compiled. None: keep nothing."""
        kernel = self.run(**given, grid=grid, warmup=False)
        if key is not None and isinstance(kernel, CompiledKernel):
            self._compiled[key] = kernel.run, kernel.function, kernel.packed_metadata


class Interpreted(InterpretedFunction):  # type: ignore[misc]  # triton has no types
    """A kernel in Triton's interpreter."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if _noting:
            return partial(_noting[-1].note, self, grid)
        return super().__getitem__(grid)  # type: ignore[no-any-return]


_LAUNCH = """
def _launch(_grid, {parameters}, **_options):
    {addresses}
    _device = _current_device()
    _key = (_device, *_options, *_options.values(), {kinds})
    _is_usual = not (({misaligned}) % {alignment} or {too_wide})
    _ready = _compiled.get(_key)
    if _ready is None or not _is_usual:
        _by_triton(_key if _is_usual else None, _grid, {{{named}, **_options}})
        return
    _run, _function, _metadata = _ready
    _size = len(_grid)
    _run(
        _grid[0], _grid[1] if _size > 1 else 1, _grid[2] if _size > 2 else 1,
        _current_stream(_device), _function, _metadata, None, None, None, {arguments},
    )
"""


def _source(parameters: Sequence[Any], given: Mapping[str, Any]) -> str:
    """Return the code of a kernel's direct launch, `_launch(grid, ...)`.

    `given`: the arguments of a launch, for their types. Written out, an argument takes a third of
    the time of a loop over all. An address is a number, which the driver is not asked about.
    """
    signature, kinds, aligned, wide = [], [], ["0"], ["False"]
    addresses, arguments = [], []
    for each in parameters:
        name, value = each.name, given.get(each.name)
        signature.append(f"{name}=_defaults[{name!r}]" if each.has_default else name)
        argument = name
        if each.is_constexpr:
            kinds.append(name)
        elif isinstance(value, Tensor):
            argument = f"_at_{name}"
            addresses.append(f"{argument} = {name}.data_ptr()")
            kinds.append(f"{name}.dtype")
            if not each.do_not_specialize_on_alignment:
                aligned.append(argument)
        elif isinstance(value, int):
            wide.append(f"{name} > {_MOST_INT}")
            if not each.do_not_specialize:
                kinds.append(f"{_ALIGNED} if not {name} % {_ALIGNED} else {name} == 1")
        arguments.append(argument)
    return _LAUNCH.format(
        parameters=", ".join(signature),
        addresses="; ".join(addresses) or "pass",
        kinds=", ".join(kinds),
        misaligned=" | ".join(aligned),
        alignment=_ALIGNED,
        too_wide=" or ".join(wide),
        named=", ".join(f"{each.name!r}: {each.name}" for each in parameters),
        arguments=", ".join(arguments),
    )
