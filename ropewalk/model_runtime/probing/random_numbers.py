"""Random numbers in the place of a model's weights, while its structure is probed.

Trained weights have exact zeros, equal rows, empty embeddings and outliers. A probe that ran on
them could take a zero for a dimension that does not rotate, or one formula for another. So every
decision about structure runs on numbers of our own, and holds for any weights:

- a linear is a sum of a few inputs for each output, chosen and scaled at random;
- an embedding is a row of a small random table;
- other parameters, and buffers of the checkpoint, are drawn around one. Experts are all equal, so
  that the choice between them moves nothing.

The numbers follow from a module's name and shape only. A linear therefore computes the same before
and after it is merged or packed. No weight is read or copied, so a probe takes the same memory and
time with any weights.

Shapes: K = inputs, N = outputs.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

_EXPERT = re.compile(r"experts\.\d+")
_NUM_TERMS = 4  # inputs that make an output of a linear
_MANY_OUTPUTS = 1 << 14  # of a head, where one input for each output must do
_NUM_ROWS = 1021  # of the table of an embedding; a prime, so that ids do not repeat in step
_LOWEST, _HIGHEST = 0.5, 1.5  # magnitudes: no zero, and no outlier
_MARK = "_has_random_numbers"


@contextmanager
def random_numbers(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let a model compute with random numbers instead of its weights, within the block.

    `dtype`: the number type of all of them; None: that of each weight. Rotary tables, constants
    that are not in checkpoints, and integers stay. Blocks of one model may be nested. Then the
    outer one holds.
    """
    if getattr(model, _MARK, False):
        yield
        return
    with ExitStack() as stack:
        object.__setattr__(model, _MARK, True)
        stack.callback(object.__delattr__, model, _MARK)
        for name, module in model.named_modules():
            function = _function(module, _generator(name), dtype)
            if function is not None:
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, function)
                continue
            own = dict(_own_tensors(module))
            num_shared = max(0, max((held.dim() for held in own.values()), default=0) - 2)
            for key, held in own.items():
                stack.callback(setattr, held, "data", held.data)
                generator = _generator(f"{name}.{key}")
                held.data = _drawn(held, num_shared, generator, dtype)
        yield


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear of any kind: plain, in few bits, merged or packed.

    Our own classes say so. A class of a checkpoint may add to a linear, as routers do.
    """
    return type(module).forward is nn.Linear.forward or getattr(type(module), "is_linear", False)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or hasattr(module, "num_embeddings")


def _generator(name: str) -> torch.Generator:
    """Return a generator for a name of a tensor; that of one expert is that of every other."""
    named = _EXPERT.sub("experts", name)
    return torch.Generator().manual_seed(crc32(named.encode()))


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(_LOWEST, _HIGHEST, generator=generator)


def _function(
    module: Any, generator: torch.Generator, dtype: torch.dtype | None
) -> Callable[..., Tensor] | None:
    """Return the forward of a linear or an embedding; None for another module.

    Our own modules with experts of few bits make theirs themselves.
    """
    made = getattr(type(module), "with_random_numbers", None)
    if made is not None:
        return made(module, generator, dtype)  # type: ignore[no-any-return]
    if _is_linear(module):
        return _RandomLinear(module.in_features, module.out_features, generator, dtype)
    if _is_embedding(module):
        weight = module.weight
        return _RandomRows(weight.shape[-1], generator, dtype or weight.dtype, weight.device)
    return None


class _RandomLinear:
    """A linear whose outputs are each a sum of a few inputs, [..., K] -> [..., N]."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        generator: torch.Generator,
        dtype: torch.dtype | None,
    ) -> None:
        shape = _NUM_TERMS if num_outputs <= _MANY_OUTPUTS else 1, num_outputs
        self._inputs_XN = torch.randint(num_inputs, shape, generator=generator)
        signs_XN = 2 * torch.randint(2, shape, generator=generator) - 1
        self._factors_XN = signs_XN * _uniform(shape, generator) / _NUM_TERMS**0.5
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        dtype, device = self._dtype or x.dtype, x.device
        wide = x.to(self._factors_XN.dtype)
        inputs_XN, factors_XN = self._inputs_XN.to(device), self._factors_XN.to(device)
        out: Tensor = wide.index_select(-1, inputs_XN[0]) * factors_XN[0]
        for inputs_N, factors_N in zip(inputs_XN[1:], factors_XN[1:], strict=True):
            out += wide.index_select(-1, inputs_N) * factors_N
        return out.to(dtype)


class _RandomRows:
    """An embedding whose rows repeat after a prime number of ids, [...] -> [..., K]."""

    def __init__(
        self,
        num_dims: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = torch.randn(_NUM_ROWS, num_dims, generator=generator)
        self._rows = rows.to(device, dtype)

    def __call__(self, input_ids: Tensor) -> Tensor:
        return self._rows[input_ids % _NUM_ROWS]


def _set_forward(module: nn.Module, forward: Any) -> None:
    """Give a module a forward of its own; None: that of its class."""
    if forward is not None:
        module.forward = forward
    else:
        vars(module).pop("forward", None)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a module that come from a checkpoint."""
    for key, parameter in module.named_parameters(recurse=False):
        yield key, parameter
    outside = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no public name
    for key, buffer in module.named_buffers(recurse=False):
        if key not in outside and not key.endswith("inv_freq"):
            yield key, buffer


def _drawn(
    held: Tensor, num_shared: int, generator: torch.Generator, dtype: torch.dtype | None
) -> Tensor:
    """Return random numbers in the shape of a tensor; the tensor itself if it holds integers.

    The first `num_shared` dimensions, which count experts, share the numbers and their memory.
    """
    if not held.is_floating_point() or held.numel() == 0 or held.is_meta:
        return held.detach()
    shape = tuple(held.shape[num_shared:])
    if len(shape) < 2:
        drawn = _uniform(shape, generator).to(held.device, dtype or held.dtype)
        return drawn.expand(held.shape)
    num_rows, num_columns = shape
    # Every row of a lone matrix begins one number further on, so that it takes no memory. Products
    # of experts refuse such a layout.
    count = num_rows * num_columns if num_shared else num_rows + num_columns
    numbers = torch.randn(count, generator=generator) * num_columns**-0.5
    strides = (num_columns, 1) if num_shared else (1, 1)
    numbers = numbers.to(held.device, dtype or held.dtype)
    matrix: Tensor = numbers.as_strided(shape, strides)
    return matrix.expand(held.shape)
