"""Kernels that other kernels call, in two forms.

numba compiles each function whole: a wrapper for Python, LLVM's passes and machine code. A kernel
here is dozens of small functions, and only the outermost is called from Python. So an inner one
stays LLVM's intermediate code after one cheap pass, and the caller's passes optimise it in place.
`python -m tests.warm_kernels` compiles in half the time, and answers keep their bits and speed.

A large kernel that several others call, such as attention, is compiled apart: once, to machine code
under a symbol of its own. Its callers are linked to the symbol, and are compiled without it.
"""

import copy
import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from numba.core import compiler, types
from numba.core.caching import CompileResultCacheImpl
from numba.core.codegen import JITCodeLibrary
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]


class _Linkable(JITCodeLibrary):  # type: ignore[misc]
    """A library that is linked into others, and that the engine never loads."""

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager(  # noqa: SLF001
            loop_vectorize=False, slp_vectorize=False, opt=0, cost="cheap"
        )
        passes.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def serialize_using_object_code(self) -> Any:
        """Return the bitcode, because there is no object code."""
        return self.serialize_using_bitcode()

    @classmethod
    def _unserialize(cls, codegen: Any, state: tuple[str, str, bytes]) -> "_Linkable":
        name, _, bitcode = state
        made = cls(codegen, name)
        made._final_module = llvm.parse_bitcode(bitcode)
        made._finalize_final_module()
        return made


class _LinkableCompiler(_FunctionCompiler):  # type: ignore[misc]
    def _compile_core(self, args: Any, return_type: Any) -> Any:
        flags = compiler.Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        flags.no_compile = flags.no_cpython_wrapper = True
        context = self.targetdescr.target_context
        made = compiler.compile_extra(
            self.targetdescr.typing_context,
            context,
            self.py_func,
            args=args,
            return_type=return_type,
            flags=flags,
            locals=self.locals,
            library=_Linkable(context.codegen(), self.py_func.__qualname__),
            pipeline_class=self.pipeline_class,
        )
        made.library._ensure_finalized()  # noqa: SLF001
        # Callers find it by its entry point. Without machine code, its library stands for that.
        needed = [*made.library._reload_init]  # noqa: SLF001
        made = made._replace(entry_point=made.library, reload_init=needed)
        context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return made


class _Elsewhere(_Linkable):
    """Stands in a kernel's callers for its machine code, which the engine finds by a symbol."""

    machine_code: Any  # the library that has it, kept alive

    def _get_module_for_linking(self) -> Any:
        return self._final_module


@dataclass(frozen=True)
class _Needed:
    """Makes the machine code that kept code of a caller calls, before that code is loaded."""

    name: str  # of a kernel in _apart
    args: tuple[Any, ...]

    def __call__(self) -> None:
        """Load or compile it, if this process has not yet."""
        _apart[self.name].compile(self.args)


_apart: dict[str, Any] = {}  # dispatchers of kernels that are compiled apart, by name


class KeptBitcode(CompileResultCacheImpl):  # type: ignore[misc]
    """The form in which numba's cache keeps an inner function."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        """Return the name of its files, which differ from those of the same function's own code."""
        return f"{super().get_filename_base(fullname, abiflags)}.inlined"

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Return what `reduce` was given, without code for an entry point."""
        state, description, environment, signature, *_, reload_init, environments = payload
        for function in reload_init:
            function()
        library = _Linkable._unserialize(target_context.codegen(), state)  # noqa: SLF001
        library._reload_init.update(reload_init)  # noqa: SLF001  # callers need them, too
        empty = dict.fromkeys(compiler.CompileResult._fields)
        return compiler.CompileResult(**empty)._replace(
            target_context=target_context,
            typing_context=target_context.typing_context,
            library=library,
            environment=environment,
            entry_point=library,
            fndesc=description,
            signature=signature,
            objectmode=False,
            lifted=(),
            reload_init=reload_init,
            referenced_envs=environments,
        )


class _EntryCompiler(_FunctionCompiler):  # type: ignore[misc]
    def _compile_core(self, args: Any, return_type: Any) -> Any:
        with _without_collection():
            made = super()._compile_core(args, return_type)
        # Environments of the inner functions that are linked in; the cache does it for kept code.
        for each in made._find_referenced_environments():  # noqa: SLF001
            made.library.codegen.set_env(each.env_name, each)
        return made


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python's collector off: a compilation makes a million objects that stay, for seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _by_symbol(made: Any, name: str) -> Any:
    """Return what callers of a kernel with machine code are compiled with.

    The symbol is the same in every process, as numba's is not, because kept callers have it.
    """
    args = tuple(made.signature.args)
    symbol = f"ropewalk_{hashlib.sha256(f'{name} {args}'.encode()).hexdigest()}"
    llvm.add_symbol(symbol, made.library.get_pointer_to_function(made.fndesc.llvm_func_name))
    library = _Elsewhere(made.library.codegen, symbol)
    library._reload_init.add(_Needed(name, args))  # noqa: SLF001
    library.machine_code = made.library
    library.finalize()
    description = copy.copy(made.fndesc)
    description.mangled_name = symbol
    made.target_context.insert_user_function(library, description, [library])
    return made._replace(entry_point=library, library=library, fndesc=description)


def split(entry: Any, inner: Any, apart: str = "") -> None:
    """Let Python call `entry` as before, and kernels call `inner`. Both are one function's.

    `apart`: the name under which `inner` has machine code of its own, the same in every process; ""
    if it is linked into its callers.

    Constants in a call, such as the 0 of `f(rows, 0)`, count as integers of unknown value. numba
    would make one more variant for each, and the caller's passes find out about them anyway.
    """
    entry._compiler = _of(_EntryCompiler, entry)  # noqa: SLF001
    inner._compiler = _of(_LinkableCompiler, inner)  # noqa: SLF001

    def add_overload(made: Any) -> None:
        inner.overloads[tuple(made.signature.args)] = made

    def compile_apart(args: tuple[Any, ...]) -> None:
        if args not in inner.overloads:
            entry.compile(args)
            add_overload(_by_symbol(entry.overloads[args], apart))

    inner.add_overload = add_overload
    if apart:
        inner.compile = compile_apart
        _apart[apart] = inner
    template: Callable[..., Any] = inner.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        return template(tuple(map(_unliteral, args)), {k: _unliteral(v) for k, v in kws.items()})

    entry.get_call_template = get_call_template
    entry.get_overload = inner.get_overload
    entry.inner = inner


def _of(kind: type[_FunctionCompiler], dispatcher: Any) -> _FunctionCompiler:
    made = dispatcher._compiler  # noqa: SLF001
    return kind(
        made.py_func, made.targetdescr, made.targetoptions, made.locals, made.pipeline_class
    )


def _unliteral(kind: Any) -> Any:
    return kind.literal_type if isinstance(kind, types.IntegerLiteral) else kind
