"""Linear layers and activations on a CPU whose rows do not depend on the batch, to the bit.

torch's own do: a plain linear picks another kernel for one row than for several, and an
activation uses other code for the last few numbers of a tensor than for the rest. Either flips
near-ties between tokens, and then a request's text depends on its neighbours.

Measured (torch 2.13, oneDNN 3.12, AVX-512 with AMX, 1 to 16 threads, widths 64 to
11,008, 1 to 1,024 rows; tests/model_runtime/test_packed_linear.py repeats a part of it):
- float32 packed for several rows: every count of rows from two up gives the same bits. One row
  alone does not where the input is wider than 1,024, so a single row is computed twice.
- bf16: up to 32 rows give the same bits; larger products are blocked differently from size to
  size, so they are computed 32 rows at a time.
- Packed products are also 2 to 3 times faster than plain ones, whatever the dtype.
- silu and tanh-gelu differ in the last bit near the end of each thread's part, unless the part is
  a multiple of the vector width. Padded blocks too small for two threads have no such end.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

_PACKED_FOR_ROWS = 8  # any number above one chooses the layout that is good for several rows
_VECTOR = 64  # a multiple of every vector width in use, in numbers
_UNSPLIT = 16_384  # numbers; torch gives a thread at least this many of any activation
# dtype -> (fewest, most) rows of one product
_ROWS = {torch.float32: (2, None), torch.bfloat16: (1, 32)}


_OPS: Any = torch.ops.mkldnn  # private to torch, so everything that touches it is in this file


def is_available() -> bool:
    """Whether this build of torch has the packed products."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and hasattr(_OPS, "_reorder_linear_weight")


class PackedLinear(nn.Module):
    """A linear whose weight is laid out once for the processor; the original is let go."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = _OPS._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._fewest_rows, self._most_rows = _ROWS[weight.dtype]
        # Model code may ask a weight for its dtype, never for its numbers.
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], each row as if it were alone."""
        rows = x.reshape(-1, self.in_features)
        num_rows = len(rows)
        if num_rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if num_rows < self._fewest_rows:
            rows = rows.expand(self._fewest_rows, -1)
        blocks = (rows,) if self._most_rows is None else torch.split(rows, self._most_rows)
        products = [self._product(block.contiguous()) for block in blocks]
        out = products[0] if len(products) == 1 else torch.cat(products)
        return out[:num_rows].reshape(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        product: Tensor = _OPS._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


class RowwiseActivation(nn.Module):
    """An activation in which no number is in a vector loop's remainder, on any number of threads.

    The tensor is padded to whole vectors, and computed in blocks that torch never splits.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """The activation, same shape."""
        padding = -x.numel() % _VECTOR
        if padding == 0 and x.numel() <= _UNSPLIT:
            return self._activation(x)  # type: ignore[no-any-return]
        flat = nn.functional.pad(x.reshape(-1), (0, padding))
        blocks = torch.split(flat, _UNSPLIT)
        activated = torch.cat([self._activation(block) for block in blocks])
        return activated[: x.numel()].reshape(x.shape)


def pack(model: nn.Module) -> None:
    """Replace every linear and stateless activation of the model, in place."""
    activations = _activation_classes()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in _ROWS:
                setattr(module, name, PackedLinear(child))
            elif isinstance(child, activations) and not list(child.parameters()):
                setattr(module, name, RowwiseActivation(child))


def _activation_classes() -> tuple[type[nn.Module], ...]:
    entries: list[Any] = list(ACT2CLS.values())
    return tuple(entry[0] if isinstance(entry, tuple) else entry for entry in entries)
