"""The division of a loaded model: which weights a rank keeps, and whether bits stay the same.

All ranks load the same files in the same order of steps, because a step that runs the model gathers
across them. First the whole model runs with its weights in the files, for the self-check. Then each
linear is cut to the rank's outputs and copied, and the files are let go.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.layers.packed_linear import PackedLinear, ways_of
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way
from ropewalk.model_runtime.layers.replace_modules import swap_modules
from ropewalk.model_runtime.parallel.group import Group
from ropewalk.model_runtime.parallel.plan import Part, Plan
from ropewalk.model_runtime.parallel.trial import Where, keeps_bits, shapes_of
from ropewalk.model_runtime.runner.backends import has_cpu_kernels

# Linears of a model that is divided: whole and still in the file, then cut to one rank's outputs.
#
# Shapes: K = inputs, N = outputs, [..., K] -> [..., N].


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


class ColumnDivision:
    """One rank's share of a model, made while the model is loaded."""

    def __init__(self, plan: Plan, group: Group) -> None:
        """Divide by a plan; nothing happens yet."""
        self.plan = plan
        self.has_same_bits = False  # as one rank; known once the model is loaded
        self._group = group
        self._num_outputs: dict[str, int] = {}  # of the divided linears, on all ranks
        self._read = torch.float32  # the number type of weights as they were read
        self._width = 1  # of a SIMD register, if compiled kernels serve the device

    def read_dtype(self, stored: torch.dtype | None, served: torch.dtype) -> torch.dtype:
        """Return the number type in which files are read: their own, if it is the smaller one.

        Memory is then mapped, not filled. A part is converted when it is cut.
        """
        is_smaller = stored is not None and stored.itemsize < served.itemsize
        self._read = stored if stored is not None and is_smaller else served
        return self._read

    def leave_in_file(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Put all weights on the device but those of divided linears; the model computes whole."""
        if has_cpu_kernels(device):
            from ropewalk.model_runtime.cpu_kernels.simd import (  # noqa: PLC0415  # imports numba
                WIDTH,
            )

            self._width = WIDTH
        for name in self.plan.parts:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            served = dtype if linear.weight.dtype == self._read else linear.weight.dtype
            model.set_submodule(name, MappedLinear(linear, served, device))
        for parameter in model.parameters():
            # transformers keeps some in float32.
            served = dtype if parameter.dtype == self._read else parameter.dtype
            parameter.data = parameter.data.to(device, served)
        return model.to(device)

    def divide(self, model: nn.Module) -> None:
        """Cut the divided linears to the rank's outputs, in place. The files are let go."""
        for name, part in self.plan.parts.items():
            whole = model.get_submodule(name)
            assert isinstance(whole, MappedLinear)
            self._num_outputs[name] = whole.out_features
            model.set_submodule(name, self._cut(whole, part))

    def note_products(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Find whether products keep their bits, and let packed linears gather.

        The linears are joined and packed, and no block of several linears is replaced yet.
        """
        shapes = shapes_of(model, self._num_outputs)
        group, ways = self._group, 0
        if has_cpu_kernels(device):
            use_packed_gathers(model)
            ways = ways_number(model)
        where = Where(group.rank, group.size, dtype, device, torch.get_num_threads())
        is_kept = all(keeps_bits(each, where) for each in shapes)
        # Ways are chosen by time if both work, so two ranks could have different ones.
        told = group.told(ways if is_kept else -1, device)
        self.has_same_bits = is_kept and len(set(told)) == 1

    def _cut(self, whole: MappedLinear, part: Part) -> nn.Module:
        if not part.gathers_input and not part.gathers_output:
            share = self._share(whole.out_features, part)
            return whole.cut(self._group.rank * share, share)
        num_outputs = -(-whole.out_features // self._group.size)
        num_inputs = (
            self._share(whole.in_features, part) if part.gathers_input else whole.in_features
        )
        linear = whole.cut(self._group.rank * num_outputs, num_outputs)
        return GatheredLinear(linear, whole, num_inputs, part, self._group)

    def _share(self, num: int, part: Part) -> int:
        """Return how many numbers between two products are a rank's; the last may have fewer.

        Heads are divided whole. A feed-forward block on a CPU is one pass over whole SIMD registers
        if its width allows that, so a share allows it if and only if the whole does.
        """
        if part.has_heads:
            return num // self._group.size
        share = -(-num // self._group.size)
        if num % self._width == 0:
            return -(-share // self._width) * self._width
        return share + (share % self._width == 0)


# Divided linears on a CPU, as other replacements of modules expect a packed linear.
#
# Shapes: R = rows, K = inputs, N = outputs.


class GatheredProduct(PackedProduct):
    """The product of one rank's outputs between its gathers, in the place of a whole product."""

    def __init__(self, linear: GatheredLinear) -> None:
        """Surround the product of a linear that is packed already."""
        own: PackedProduct = linear.linear.product
        self.way = own.way
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._own, self._gathered = own, linear.gathered
        self._dtype = linear.linear.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product of the gathered inputs, gathered: [..., K] -> [..., N]."""
        return self._gathered(self._own, x)

    def multiply(self, x_RK: Any) -> Any:
        """Compute the product, [R, K] -> [R, N]; numpy arrays of float32 or of bf16's bits."""
        return as_numpy(self(as_tensor(x_RK, self._dtype)))


def use_packed_gathers(model: nn.Module) -> None:
    """Replace each divided linear, once it is packed, by a packed linear that gathers, in place."""

    def other(module: nn.Module) -> PackedLinear | None:
        if not isinstance(module, GatheredLinear) or not isinstance(module.linear, PackedLinear):
            return None
        linear = module.linear
        product = GatheredProduct(module)
        linear.in_features, linear.out_features = product.in_features, product.out_features
        linear.product = product
        return linear

    swap_modules(model, other)


def ways_number(model: nn.Module) -> int:
    """Return the ways of all products of a packed model as bits of a number."""
    ways = ways_of(model)
    return sum(1 << place for place, way in enumerate(Way) if way in ways)
