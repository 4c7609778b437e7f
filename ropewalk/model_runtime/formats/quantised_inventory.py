"""Match the tensors of weight files to the weights of the model, by names, types and shapes.

Only the files' heads and small tensors of indices are read, without torch. A tensor that no rule
knows is refused.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.quantised_scheme import (
    OF_ACTIVATIONS,
    PER_TENSOR,
    UNSTATED,
    Grid,
    Group,
    Scheme,
    is_part,
)

Shape = tuple[int, ...]
Files = Mapping[Path, Any]  # safetensors' open files

_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALES = (*_FLOATS, "F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    name: str
    shape: Shape
    kind: str  # the number type by safetensors' name


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The tensors of the files that make one weight of the model."""

    name: str
    shape: Shape  # of the weight
    group: Group
    grid: Grid
    parts: Mapping[str, StoredTensor]  # by role: values, scale, zero_point, order


@dataclass(frozen=True, slots=True)
class Inventory:
    """The weights of a quantised checkpoint."""

    quantised: Sequence[QuantisedWeight]
    plain: Sequence[StoredTensor]

    @property
    def num_parameters(self) -> int:
        shapes = [each.shape for each in self.quantised]
        shapes += [each.shape for each in self.plain]
        return sum(math.prod(shape) for shape in shapes)


def read_inventory(paths: Sequence[Path], scheme: Scheme) -> Inventory:
    """Match the files' tensors to weights.

    Raises ModelError that names the file and a tensor which is missing, unknown, or does not fit.
    """
    quantised = []
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="np")) for path in paths}
        left = _stored(files)
        names = frozenset(left)
        for name in list(left):
            if name in left and (found := _weight(name, left, files, scheme)) is not None:
                quantised.append(found)
                for part in found.parts.values():
                    left.pop(part.name, None)
    plain = []
    for tensor in left.values():
        if tensor.name.endswith(OF_ACTIVATIONS) and scheme.has_activations:
            continue
        if tensor.kind not in _FLOATS or is_part(tensor.name, names):
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name} of type {tensor.kind} has no meaning in "
                f"quantization {scheme}"
            )
        plain.append(tensor)
    if not quantised:
        raise ModelError(f"{paths[0]}: no tensor is stored in {scheme}")
    return Inventory(quantised, plain)


def refuse_unstated(paths: Iterable[Path]) -> None:
    """Raise ModelError if a file has a quantised weight. The config states no quantisation."""
    for path in paths:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(UNSTATED):
                    raise ModelError(
                        f"{path}: tensor {name} belongs to a quantised weight, but config.json has "
                        "no quantization_config"
                    )


def _stored(files: Files) -> dict[str, StoredTensor]:
    found = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118
            view = file.get_slice(name)
            found[name] = StoredTensor(path, name, tuple(view.get_shape()), view.get_dtype())
    return found


def _weight(
    name: str, tensors: Mapping[str, StoredTensor], files: Files, scheme: Scheme
) -> QuantisedWeight | None:
    """Return the weight that a tensor holds the values of; None if it holds none."""
    tensor = tensors[name]
    module, _, last = name.rpartition(".")
    if scheme.method in ("gptq", "awq"):
        read = (_gptq if scheme.method == "gptq" else _awq) if last == "qweight" else None
    elif scheme.method == "mxfp4":
        read = _mxfp4 if name.endswith("_blocks") else None
    elif last == "weight_packed":
        read = _packed
    elif name.endswith((*OF_ACTIVATIONS, "_zero_point")):
        read = None  # a zero point may be I8, as values are
    else:
        read = _eight_bits if tensor.kind in ("I8", "F8_E4M3") else None
    if read is None:
        return None
    group = scheme.group_of(module)
    if group is None:
        raise ModelError(f"{tensor.path}: no target of config_groups is {module}, which has {last}")
    return read(_Parts(tensors, files, tensor, group))


class _Parts:
    """The tensors of one weight, found by name and compared with the shapes of its scheme."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        files: Files,
        values: StoredTensor,
        group: Group,
    ) -> None:
        self._tensors, self._files, self.values, self.group = tensors, files, values, group
        self._found = {"values": values}

    @property
    def module(self) -> str:
        return self.values.name.rpartition(".")[0]

    def find(self, role: str, name: str, kinds: Sequence[str]) -> StoredTensor | None:
        """Return a tensor and note its role; None if it is absent. Raises ModelError."""
        found = self._tensors.get(name)
        if found is not None:
            self._found[role] = found
            self.check_kind(found, kinds)
        return found

    def need(self, role: str, names: Sequence[str], kinds: Sequence[str]) -> StoredTensor:
        """Return the tensor with one of the names, and note its role. Raises ModelError."""
        for name in names:
            if (found := self.find(role, name, kinds)) is not None:
                return found
        raise ModelError(
            f"{self.values.path}: {self.values.name} needs {names[0]}, which is absent"
        )

    def check_kind(self, tensor: StoredTensor, kinds: Sequence[str]) -> None:
        """Raise ModelError for a tensor of another number type."""
        if tensor.kind not in kinds:
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name} must have type {' or '.join(kinds)} in "
                f"{self.group}, got {tensor.kind}"
            )

    def check_shape(self, tensor: StoredTensor, *accepted: Shape) -> None:
        """Raise ModelError for a tensor of another shape."""
        if tensor.shape not in accepted:
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name} must have shape {list(accepted[0])} in "
                f"{self.group}, got {list(tensor.shape)}"
            )

    def check_dimensions(self, number: int) -> None:
        """Raise ModelError unless the values have this number of dimensions."""
        if len(self.values.shape) != number:
            raise ModelError(
                f"{self.values.path}: tensor {self.values.name} must have {number} dimensions in "
                f"{self.group}, got shape {list(self.values.shape)}"
            )

    def check_groups(self, num_columns: int, grid: Grid) -> None:
        """Raise ModelError for a last group that is not whole."""
        if grid.rows == 1 and grid.columns and num_columns % grid.columns:
            raise ModelError(
                f"{self.values.path}: {self.values.name} has {num_columns} columns, which are no "
                f"whole groups of {grid.columns}"
            )

    def numbers(self, tensor: StoredTensor) -> Any:
        return self._files[tensor.path].get_tensor(tensor.name)

    def check_order(self, name: str, num_columns: int, num_groups: int) -> None:
        """Note the group of each input, if it is stated. Raises ModelError.

        -1 everywhere is compressed-tensors' word for groups that follow each other.
        """
        order = self.find("order", name, ("I32", "I64"))
        if order is None:
            return
        self.check_shape(order, (num_columns,))
        values = self.numbers(order)
        low, high = int(values.min()), int(values.max())
        if low == high == -1:
            del self._found["order"]
            self._found["unused order"] = order
        elif low < 0 or high >= num_groups:
            raise ModelError(
                f"{order.path}: tensor {order.name} must have indices of {num_groups} groups, got "
                f"{low} to {high}"
            )

    def weight(self, name: str, shape: Shape, grid: Grid) -> QuantisedWeight:
        return QuantisedWeight(name, shape, self.group, grid, self._found)


def _eight_bits(parts: _Parts) -> QuantisedWeight:
    """Match int8 or FP8 values [..., O, I], which have a scale beside them."""
    values, group = parts.values, parts.group
    parts.check_kind(values, ("F8_E4M3",) if group.layout == "fp8" else ("I8",))
    stem = values.name
    scales = [f"{stem}_scale_inv", f"{stem}_scale"]
    if stem.endswith(".weight"):
        scales += [f"{parts.module}.scale", f"{parts.module}.qscale_weight"]
    if values.shape[:-2]:
        parts.check_dimensions(3)
    else:
        parts.check_dimensions(2)
    scale = parts.need("scale", scales, _SCALES)
    *experts, num_rows, num_columns = values.shape
    accepted: dict[Grid, list[Shape]] = {}
    for grid in group.grids:
        parts.check_groups(num_columns, grid)
        whole = (*experts, *grid.shape(num_rows, num_columns))
        accepted[grid] = [whole]
        if grid.columns == 0:
            accepted[grid].append(whole[:-1])
        if grid == PER_TENSOR:
            accepted[grid].append(tuple(experts))
    grid = next((each for each in group.grids if scale.shape in accepted[each]), group.grids[-1])
    parts.check_shape(scale, *accepted[grid])
    if group.has_zero_points:
        zero = parts.need("zero_point", [f"{stem}_zero_point"], ("I8", *_FLOATS))
        parts.check_shape(zero, scale.shape)
    return parts.weight(values.name, values.shape, grid)


def _packed(parts: _Parts) -> QuantisedWeight:
    """Match words of compressed-tensors: values [O, words], offset by half their range."""
    values, group, module = parts.values, parts.group, parts.module
    if group.layout != "packed":
        raise ModelError(f"{values.path}: tensor {values.name} does not belong to {group}")
    parts.check_kind(values, ("I32",))
    parts.check_dimensions(2)
    scale = parts.need("scale", [f"{module}.weight_scale"], _FLOATS)
    stated = parts.need("shape", [f"{module}.weight_shape"], ("I64", "I32"))
    parts.check_shape(stated, (2,))
    num_rows, num_columns = (int(each) for each in parts.numbers(stated))
    parts.check_shape(values, (num_rows, math.ceil(num_columns * group.bits / 32)))
    grid = group.grids[0]
    parts.check_groups(num_columns, grid)
    scales = grid.shape(num_rows, num_columns)
    parts.check_shape(scale, scales, *([scales[:1]] if grid.columns == 0 else []))
    if group.has_zero_points:
        zero = parts.need("zero_point", [f"{module}.weight_zero_point"], ("I32", "I8"))
        words = (math.ceil(scales[0] * group.bits / 32), scales[1])
        parts.check_shape(zero, words if zero.kind == "I32" else scales)
    parts.check_order(f"{module}.weight_g_idx", num_columns, scales[1])
    return parts.weight(f"{module}.weight", (num_rows, num_columns), grid)


def _gptq(parts: _Parts) -> QuantisedWeight:
    """Match words of GPTQ: values [I words, O], scales [G, O], zero points [G, O words]."""
    values, module, bits = parts.values, parts.module, parts.group.bits
    parts.check_kind(values, ("I32",))
    parts.check_dimensions(2)
    num_columns, num_rows = values.shape[0] * 32 // bits, values.shape[1]
    _match_transposed(parts, num_rows, num_columns)
    num_groups = parts.group.grids[0].shape(num_rows, num_columns)[1]
    parts.check_order(f"{module}.g_idx", num_columns, num_groups)
    return parts.weight(f"{module}.weight", (num_rows, num_columns), parts.group.grids[0])


def _awq(parts: _Parts) -> QuantisedWeight:
    """Match words of AWQ: values [I, O words], scales [G, O], zero points [G, O words]."""
    values, module, bits = parts.values, parts.module, parts.group.bits
    parts.check_kind(values, ("I32",))
    parts.check_dimensions(2)
    num_columns, num_rows = values.shape[0], values.shape[1] * 32 // bits
    _match_transposed(parts, num_rows, num_columns)
    return parts.weight(f"{module}.weight", (num_rows, num_columns), parts.group.grids[0])


def _match_transposed(parts: _Parts, num_rows: int, num_columns: int) -> None:
    grid, bits = parts.group.grids[0], parts.group.bits
    parts.check_groups(num_columns, grid)
    num_groups = grid.shape(num_rows, num_columns)[1]
    scale = parts.need("scale", [f"{parts.module}.scales"], _FLOATS)
    parts.check_shape(scale, (num_groups, num_rows))
    zero = parts.need("zero_point", [f"{parts.module}.qzeros"], ("I32",))
    parts.check_shape(zero, (num_groups, math.ceil(num_rows * bits / 32)))


def _mxfp4(parts: _Parts) -> QuantisedWeight:
    """Match blocks [E, O, G, 16 bytes] with scales [E, O, G]; the model holds [E, G*32, O]."""
    values = parts.values
    stem = values.name.removesuffix("_blocks")
    parts.check_kind(values, ("U8",))
    parts.check_dimensions(4)
    num_experts, num_rows, num_groups, _ = values.shape
    parts.check_shape(values, (num_experts, num_rows, num_groups, 16))
    scale = parts.need("scale", [f"{stem}_scales"], ("U8",))
    parts.check_shape(scale, (num_experts, num_rows, num_groups))
    shape = (num_experts, num_groups * 32, num_rows)
    return parts.weight(stem, shape, parts.group.grids[0])
