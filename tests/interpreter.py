"""A faster interpreter of Triton's kernels, with the same results.

Triton's own interpreter finds the language of each kernel, the type of each result and the overflow
of each sum of integers in Python. That takes most of the time of a kernel on small tiles. Here the
first two are found once, and the overflow is not looked for.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

import ropewalk.model_runtime.gpu.launch  # noqa: F401  # it changes Triton 3.6's interpreter first

_FLOATS = {"fp16", "fp32", "fp64"}
_INTEGERS = {"int32", "int64"}
_COMPUTED = {
    "add": (np.add, _FLOATS | _INTEGERS),
    "sub": (np.subtract, _FLOATS | _INTEGERS),
    "mul": (np.multiply, _FLOATS | _INTEGERS),
    "truediv": (np.divide, {"fp32", "fp64"}),
    "and": (np.bitwise_and, {"int1", *_INTEGERS}),
    "or": (np.bitwise_or, {"int1", *_INTEGERS}),
}
_COMPARED = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def hasten() -> None:
    """Let kernels of this process be interpreted faster from now on."""
    if hasattr(interpreter, "_is_hastened"):
        return
    interpreter._is_hastened = True
    # A launch, and a function that a kernel calls, replaced all names of the language again.
    kept = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    kept._changes.clear()  # what a launch would restore at its end
    interpreter._patch_lang = lambda _: kept
    # Each sum of integers was computed in int64, too, which showed an overflow.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _get_np_dtype
    tl.block_type.__init__ = _block_type
    tl.block_type.name = property(lambda self: f"<{list(self.shape)}, {self.element_ty}>")
    tl.tensor.__init__ = _tensor
    type(interpreter.interpreter_semantic).broadcast_impl_value = _broadcast
    for name, (compute, kinds) in _COMPUTED.items():
        _let(name, compute, kinds, None)
        _let(f"r{name}", lambda a, b, compute=compute: compute(b, a), kinds, None)
    for name, compare in _COMPARED.items():
        _let(name, compare, _FLOATS | _INTEGERS, tl.int1)


_np_dtype = interpreter._get_np_dtype
_NUMPY = {
    each: _np_dtype(each)
    for each in vars(tl.core).values()
    if type(each) is tl.dtype and each.name != "void"
}


def _get_np_dtype(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return _NUMPY[element] if type(element) is tl.dtype else _np_dtype(element)


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any, int, Any]:
    """A type's shape and a tensor's, and the number of elements of both."""
    count = tl.core.validate_block_shape(sizes)
    constants = tl.tuple([tl.constexpr(each) for each in sizes])
    return tl.tuple(list(sizes)), constants, count, tl.constexpr(count)


_SCALAR = _shape(())


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    known = _shape(tuple(map(operator.index, shape)))
    if not known[0].values:
        raise TypeError("0d block_type is forbidden")
    self.known = known
    self.shape, self.numel = known[0], known[2]


def _tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  # Triton's name
    self.handle = handle
    self.type = type
    known = type.known if type.is_block() else _SCALAR
    self.shape, self.numel = known[1], known[3]
    self.dtype = type.scalar


def _broadcast(_: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Both operands, in one shape."""
    types = lhs.type, rhs.type
    blocks = [each.known for each in types if each.is_block()]
    if not blocks or (len(blocks) == len(types) and blocks[0] is blocks[1]):
        return lhs, rhs
    sizes = np.broadcast_shapes(*(known[0].values for known in blocks))
    wanted = _shape(sizes)

    def shaped(given: Any) -> Any:
        if given.type.is_block() and given.type.known is wanted:
            return given
        element = given.type.scalar
        handle = TensorHandle(np.broadcast_to(given.handle.data, sizes), element)
        return tl.tensor(handle, tl.block_type(element, sizes))

    return shaped(lhs), shaped(rhs)


def _let(name: str, compute: Callable[[Any, Any], Any], kinds: set[str], result: Any) -> None:
    """Compute at once with operands of one type, or with a number that does not change the type."""
    by_triton = getattr(tl.tensor, f"__{name}__")
    floats = kinds & _FLOATS
    of_pointers = interpreter.interpreter_builder.create_addptr if name == "add" else None

    def method(self: Any, other: Any) -> Any:
        dtype, kind = self.dtype, type(other)
        if kind is tl.tensor:
            if dtype.name in kinds and other.dtype.name == dtype.name:
                handle = TensorHandle(compute(self.handle.data, other.handle.data), result or dtype)
            elif of_pointers and type(dtype) is tl.pointer_type and other.dtype.name in _INTEGERS:
                handle = of_pointers(self.handle, other.handle)
            else:
                return by_triton(self, other)
            is_block = self.type.is_block() or other.type.is_block()
        elif dtype.name in (kinds if kind is int else floats if kind is float else ()):
            handle = TensorHandle(compute(self.handle.data, other), result or dtype)
            is_block = self.type.is_block()
        else:
            return by_triton(self, other)
        made = handle.dtype
        return tl.tensor(handle, tl.block_type(made, handle.data.shape) if is_block else made)

    setattr(tl.tensor, f"__{name}__", method)
