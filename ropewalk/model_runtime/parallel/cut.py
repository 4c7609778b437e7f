"""Linears of a model that is divided: whole and still in the file, then cut to one rank's outputs.

Shapes: K = inputs, N = outputs, [..., K] -> [..., N].
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.parallel.group import Group
from ropewalk.model_runtime.parallel.plan import Part


class MappedLinear(nn.Module):
    """A linear whose weight stays as it was read, and is converted anew for each product.

    A weight that was read from a file is mapped memory, which the system can drop and read again.
    So a whole model computes in the memory of one linear. It is slow.
    """

    is_linear: ClassVar = True  # see random_numbers.py

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype, self._device = dtype, device
        # No parameters: the model's conversions leave them as they are.
        self.weight = _held(linear.weight)
        self.bias = None if linear.bias is None else _held(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear, [..., K] -> [..., N]."""
        bias = None if self.bias is None else self.bias.to(self._device, self._dtype)
        return nn.functional.linear(x, self.weight.to(self._device, self._dtype), bias)

    def cut(self, first: int, num: int) -> nn.Linear:
        """Return a copy of `num` outputs from `first` on.

        Beyond the last output, the first ones follow. They are dropped after a gather, but a
        product is tried with them, and zeros would show nothing.
        """
        linear = nn.Linear(
            self.in_features, num, bias=self.bias is not None, device="meta", dtype=self._dtype
        )
        linear.weight = nn.Parameter(self._rows(self.weight, first, num), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self._rows(self.bias, first, num), requires_grad=False)
        return linear

    def _rows(self, whole: Tensor, first: int, num: int) -> Tensor:
        rows = torch.empty(num, *whole.shape[1:], dtype=self._dtype, device=self._device)
        own = whole[first : first + num]
        rows[: len(own)] = own
        rows[len(own) :] = whole[: num - len(own)]
        return rows


def _held(parameter: Tensor) -> Tensor:
    """Return the tensor of a parameter, which a module does not list."""
    return parameter.detach()


class GatheredLinear(nn.Module):
    """One rank's outputs of a linear, between the gathers that it needs."""

    def __init__(
        self, linear: nn.Linear, whole: MappedLinear, num_inputs: int, part: Part, group: Group
    ) -> None:
        """Surround `linear`, the rank's outputs of `whole`. `num_inputs`: that the rank has."""
        super().__init__()
        self.linear: Any = linear  # packed later on
        self.in_features = num_inputs
        self.out_features = whole.out_features if part.gathers_output else linear.out_features
        self.group = group
        self.gathered_inputs = whole.in_features if part.gathers_input else None
        self.gathered_outputs = whole.out_features if part.gathers_output else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear from a part of its inputs, or from all of them."""
        return self.gathered(self.linear, x)

    def gathered(self, product: Any, x: Tensor) -> Tensor:
        """Return a product of the gathered inputs, gathered."""
        if self.gathered_inputs is not None:
            x = self.group.gather(x, self.gathered_inputs)
        out: Tensor = product(x)
        if self.gathered_outputs is not None:
            out = self.group.gather(out, self.gathered_outputs)
        return out
