"""The division of a loaded model: which weights a rank keeps, and whether bits stay the same.

All ranks load the same files in the same order of steps, because a step that runs the model gathers
across them. First the whole model runs with its weights in the files, for the self-check. Then each
linear is cut to the rank's outputs and copied, and the files are let go.
"""

import torch
from torch import nn

from ropewalk.model_runtime.parallel.cut import GatheredLinear, MappedLinear
from ropewalk.model_runtime.parallel.group import Group
from ropewalk.model_runtime.parallel.plan import Part, Plan
from ropewalk.model_runtime.parallel.trial import Where, keeps_bits, shapes_of
from ropewalk.model_runtime.runner.backends import has_cpu_kernels


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

        The linears are packed, and their gathers are not part of their products yet.
        """
        shapes = shapes_of(model, self._num_outputs)
        group, ways = self._group, 0
        if has_cpu_kernels(device):
            from ropewalk.model_runtime.parallel.packed_cut import (  # noqa: PLC0415  # imports numba
                use_packed_gathers,
                ways_number,
            )

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
