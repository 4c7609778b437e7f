"""What notes the operations of a forward: the calls of our modules, and torch's own functions.

A view, a copy or another order of dimensions is no operation. It says which columns an operation
reads: each element of a tensor's memory has a value, a token and a column. A function of torch that
is not known ends the trace with its name.

Shapes: T = tokens of the trace, C = columns of a value, S = elements of a tensor's memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.model_runtime.attention.paged_attention import (
    STEP,
    AttentionCall,
    LayerPlan,
)
from ropewalk.model_runtime.tracing.operations import (
    Activate,
    Attend,
    Combine,
    Norm,
    Operand,
    Operation,
    Product,
    TailCall,
    Trace,
    UntraceableError,
    Value,
)

NUM_TOKENS = 3
_COMBINED = {"aten.add.Tensor": "add", "aten.sub.Tensor": "subtract", "aten.mul.Tensor": "multiply"}
# Constants in the number type of a value.
_CONSTANTS = {f"aten.{name}.default" for name in ("new_full", "new_zeros", "new_ones", "new_empty")}
_CONSTANTS |= {f"aten.{name}.default" for name in ("full_like", "zeros_like", "ones_like")}
_COPIES = {"aten.clone.default", "aten._to_copy.default", "aten.cat.default"}
# Functions that return a view, or a copy if there is none.
_COPIES |= {"aten.contiguous.default", "aten.flatten.using_ints", "aten.reshape.default"}


class _Placed:
    """The places of a tensor's memory: which column of which value, of which token, each is."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.tensor = tensor  # kept, so that no other tensor gets its memory
        self.values_S = np.full(size, -1)
        self.tokens_S = np.zeros(size, np.int64)
        self.columns_S = np.zeros(size, np.int64)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes the operations of a forward that runs within it."""

    # Whether dimensions of queries and keys are taken in the order of the cache.
    in_cache_order: ClassVar[bool] = False

    def __init__(self, plans: Mapping[int, LayerPlan]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plans = plans
        self._placed: dict[int, _Placed] = {}  # by the address of memory
        self._positions: dict[int, Tensor] = {}  # that follow from positions or tokens
        self._tail: list[Tensor] = []  # the head's output and what follows from it
        self._num_values = 0
        self.trace: Trace | None = None

    def of(self, model: Any) -> Trace:
        """Return the trace of a model's forward; its modules note themselves, by this recorder.

        Raises UntraceableError.
        """
        device = next(model.parameters()).device
        positions = torch.arange(NUM_TOKENS, device=device)[None]
        input_ids = positions + 1
        self.note_input(positions)
        self.note_input(input_ids)
        with self:
            try:
                logits = model(
                    input_ids=input_ids,
                    position_ids=positions,
                    use_cache=False,
                    logits_to_keep=0,
                    **{STEP: self},
                ).logits
            except UntraceableError:
                raise
            except Exception as error:
                raise UntraceableError(f"{type(error).__name__}: {error}") from error
        if self.trace is None or not self.is_result(logits):
            raise UntraceableError("does not end with its head")
        return self.trace

    # Values

    def value(self, num_columns: int) -> Value:
        self._num_values += 1
        return Value(num_columns, self._num_values - 1)

    def _place(self, tensor: Tensor, value: Value, token_axis: int = 1) -> Tensor:
        """Note that a new tensor is a value; its dimensions but that of tokens are the columns."""
        placed = _Placed(tensor)
        offsets = np.moveaxis(_offsets(tensor), token_axis, 0).reshape(NUM_TOKENS, -1)
        placed.values_S[offsets] = value.number
        placed.tokens_S[offsets] = np.arange(NUM_TOKENS)[:, None]
        placed.columns_S[offsets] = np.arange(value.num_columns)
        self._placed[_address(tensor)] = placed
        return tensor

    def output(self, like: Tensor, shape: tuple[int, ...], token_axis: int = 1) -> Any:
        """Return zeros of a shape, and the value that they are."""
        value = self.value(int(np.prod(shape)) // NUM_TOKENS)
        return self._place(like.new_zeros(shape), value, token_axis), value

    def _elements(self, tensor: Tensor) -> tuple[NDArray[np.int64], ...]:
        """Return values, tokens and columns of each element, in the tensor's shape."""
        placed = self._placed.get(_address(tensor))
        if placed is None:
            raise UntraceableError("reads a tensor of another kind")
        offsets = _offsets(tensor)
        return placed.values_S[offsets], placed.tokens_S[offsets], placed.columns_S[offsets]

    def operand(self, tensor: Tensor) -> tuple[Operand, int]:
        """Return the columns that a tensor is made of, and its dimension of tokens."""
        values, tokens, columns = self._elements(tensor)
        for axis, size in enumerate(tensor.shape):
            if size != NUM_TOKENS:
                continue
            by_token = [np.moveaxis(each, axis, 0).reshape(size, -1) for each in (values, columns)]
            same = all((each == each[0]).all() for each in by_token)
            tokens_TC = np.moveaxis(tokens, axis, 0).reshape(size, -1)
            if same and (tokens_TC == np.arange(size)[:, None]).all():
                return Operand(by_token[0][0], by_token[1][0]), axis
        raise UntraceableError("mixes tokens")

    # Our own modules

    def note(self, make: Callable[..., Operation], x: Tensor, num_columns: int) -> Tensor:
        """Note an operation on x, [..., K] -> [..., `num_columns`]."""
        operand, axis = self.operand(x)
        out, value = self.output(x, (*x.shape[:-1], num_columns), axis)
        self.operations.append(make(value, operand))
        return out  # type: ignore[no-any-return]

    @property
    def operations(self) -> list[Operation]:
        if self.trace is None:
            raise UntraceableError("does not begin with its embedding")
        return self.trace.operations

    def embed(self, embedding: Any, input_ids: Tensor) -> Tensor:
        """Note the embedding, which the trace begins with."""
        if self.trace is not None or input_ids.shape != (1, NUM_TOKENS):
            raise UntraceableError("has several embeddings")
        width = int(embedding.weight.shape[-1])
        zeros = embedding.weight.new_zeros(1, NUM_TOKENS, width)
        value = self.value(width)
        self.trace = Trace(value)
        return self._place(zeros, value)

    def normalize(self, norm: Any, num_dims: int, x: Tensor) -> Tensor:
        if x.shape[-1] != num_dims:
            raise UntraceableError("normalizes another width than its scale has")
        return self.note(lambda out, operand: Norm(out, operand, norm), x, x.shape[-1])

    def activate(self, kind: int, x: Tensor) -> Tensor:
        return self.note(lambda out, operand: Activate(out, operand, None, kind), x, x.shape[-1])

    def multiply(self, linears: Any, x: Tensor) -> Tensor:
        def make(out: Value, operand: Operand) -> Product:
            if len(operand.columns_C) != linears.in_features:
                raise UntraceableError("multiplies rows of another width")
            return Product(out, operand, linears)

        return self.note(make, x, linears.out_features)

    def end(self, linears: Any, x: Tensor) -> Tensor:
        """Note the head, after which torch computes."""
        trace = self.trace
        if trace is None or trace.head is not None:
            raise UntraceableError("calls its head twice")
        operand, _ = self.operand(x)
        value = self.value(linears.out_features)
        trace.head = Product(value, operand, linears)
        out = x.new_zeros(1, NUM_TOKENS, linears.out_features)
        self._tail.append(out)
        return out

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Note a layer's attention; return zeros, [1, T, H, V]."""
        query, key, value = call.query_1HTD, call.key_1KTD, call.value_1KTV
        read, written, held = (self.operand(each)[0] for each in (query, key, value))
        num_heads, value_dim = query.shape[1], value.shape[-1]
        out, result = self.output(value, (1, NUM_TOKENS, num_heads, value_dim))
        plan = self._plans[layer_idx]
        if self.in_cache_order:
            read = _in_cache_order(read, num_heads, plan)
            written = _in_cache_order(written, plan.num_key_heads, plan)
        kept = AttentionCall(*(query[:0], key[:0], value[:0]), *_rest(call))
        self.operations.append(Attend(result, layer_idx, read, written, held, num_heads, kept))
        return out  # type: ignore[no-any-return]

    # torch's own operations

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run a function of torch, and note it if it takes a value."""
        del types
        named = named or {}
        out = function(*arguments, **named)
        tensors = _tensors((arguments, named))
        addresses = {_address(each) for each in tensors}
        if any(each is kept for each in tensors for kept in self._tail):
            self._follow(function, arguments, named, out)
        elif addresses & self._placed.keys():
            self._note_torch(str(function), arguments, named, out, addresses)
        elif addresses & self._positions.keys():
            for each in _tensors(out):
                self._positions[_address(each)] = each
        return out

    def _note_torch(
        self, name: str, arguments: Any, named: Any, out: Any, addresses: set[int]
    ) -> None:
        outs = _tensors(out)
        if addresses & self._positions.keys():
            raise UntraceableError(f"computes {_plain(name)} of a position")
        if outs and all(_address(each) in self._placed for each in outs) and "_." not in name:
            return  # a view
        if name in _CONSTANTS:
            return
        if name in _COPIES and named.get("dtype") in (None, outs[0].dtype):
            self._copy(name, arguments, named, out)
        elif name in _COMBINED and not named:
            x, other = arguments
            self._combine(_COMBINED[name], x, other, out)
        else:
            raise UntraceableError(_without_kernel(name))

    def _copy(self, name: str, arguments: Any, named: Any, out: Tensor) -> None:
        """Note that a new tensor has the elements of others."""
        parts = [self._elements(each) for each in _tensors(arguments)]
        if name == "aten.cat.default":
            axis = arguments[1] if len(arguments) > 1 else named.get("dim", 0)
            parts = [tuple(np.concatenate(each, axis) for each in zip(*parts, strict=True))]
        placed, offsets = _Placed(out), _offsets(out)
        values, tokens, columns = (each.reshape(out.shape) for each in parts[0])
        placed.values_S[offsets], placed.tokens_S[offsets] = values, tokens
        placed.columns_S[offsets] = columns
        self._placed[_address(out)] = placed

    def _combine(self, name: str, x: Any, other: Any, out: Tensor) -> None:
        """Note a sum, difference or product, whose operands have one shape or are constant."""
        if not self._is_value(x):
            if name == "subtract":
                raise UntraceableError("subtracts from a constant")
            x, other = other, x
        if x.shape != out.shape or x.dtype != out.dtype:
            raise UntraceableError(f"has to {name} other shapes")
        operand, axis = self.operand(x)
        if self._is_value(other):
            second, second_axis = self.operand(other)
            if other.shape != out.shape or second_axis != axis:
                raise UntraceableError(f"has to {name} other shapes")
            read: Operand | NDArray[np.float32] = second
        else:
            if isinstance(other, Tensor) and other.dim() > 1 and other.shape[-2] != 1:
                # Code of ours that numba or numpy computes, which no function of torch shows.
                raise UntraceableError("reads what torch did not compute")
            constant = torch.as_tensor(other).detach().float().expand(out.shape).cpu().numpy()
            constant_TC = np.moveaxis(constant, axis, 0).reshape(NUM_TOKENS, -1)
            if (constant_TC != constant_TC[:1]).any():
                raise UntraceableError(f"has to {name} a constant for each token")
            read = constant_TC[0].copy()  # not of the file that holds the weights
        value = self.value(len(operand.columns_C))
        self._place(out, value, axis)
        self.operations.append(Combine(value, name, operand, read))

    def _is_value(self, thing: Any) -> bool:
        return isinstance(thing, Tensor) and _address(thing) in self._placed

    def _follow(self, function: Any, arguments: Any, named: Any, out: Any) -> None:
        """Note a call after the head, which is repeated by torch."""
        name = str(function)
        if named or not isinstance(out, Tensor) or "_." in name:
            raise UntraceableError(_without_kernel(name))
        places = tuple(
            next((i for i, kept in enumerate(self._tail) if kept is each), None)
            for each in arguments
        )
        assert self.trace is not None
        self.trace.tail.append(TailCall(function, arguments, places))
        self._tail.append(out)

    def note_input(self, numbers: Tensor) -> None:
        """Note the tensor of positions or tokens: no operation but the embedding may read it."""
        self._positions[_address(numbers)] = numbers

    def is_result(self, logits: Tensor) -> bool:
        return bool(self._tail) and logits is self._tail[-1]


def _plain(name: str) -> str:
    return name.removeprefix("aten.").partition(".")[0]


def _without_kernel(name: str) -> str:
    return f"{_plain(name)} of torch has no kernel"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _offsets(tensor: Tensor) -> NDArray[np.int64]:
    """Return each element's place in memory, in the tensor's shape."""
    offsets: NDArray[np.int64] = np.full(tensor.shape, tensor.storage_offset(), np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = size
        offsets = offsets + (np.arange(size) * stride).reshape(shape)
    return offsets


def _tensors(things: Any) -> list[Tensor]:
    if isinstance(things, Tensor):
        return [] if things.is_meta else [things]
    if isinstance(things, dict):
        things = list(things.values())
    if isinstance(things, list | tuple):
        return [each for thing in things for each in _tensors(thing)]
    return []


def part_of(value: Value, half: int | None) -> Operand:
    """Return all columns of a value, or one half of them."""
    columns_C = np.arange(value.num_columns)
    if half is not None:
        columns_C = columns_C.reshape(2, -1)[half]
    return Operand(np.full(len(columns_C), value.number), columns_C)


def _in_cache_order(operand: Operand, num_heads: int, plan: LayerPlan) -> Operand:
    """Return queries or keys with the dimensions of each head in the order of the cache."""
    parts = (operand.values_C, operand.columns_C)
    heads = [torch.from_numpy(each.reshape(num_heads, -1)) for each in parts]
    return Operand(*(plan.in_cache_order(each).flatten().numpy() for each in heads))


def _rest(call: AttentionCall) -> tuple[Any, ...]:
    return call.scaling, call.sliding_window, call.softcap, call.sinks_H


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object an attribute of its own within the block."""
    had, before = name in vars(owner), vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)
