"""Read `quantization_config` of a config.json, or refuse it by the field that is not read."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.quantised_scheme import (
    FORMATS,
    PATTERN,
    PER_ROW,
    PER_TENSOR,
    Grid,
    Group,
    Layout,
    Scheme,
)

_BLOCK = Grid(128, 128)
_LAYOUTS: Mapping[tuple[str, str], Layout] = {
    ("pack-quantized", "int"): "packed",
    ("int-quantized", "int"): "int8",
    ("naive-quantized", "int"): "int8",
    ("naive-quantized", "float"): "fp8",
    ("float-quantized", "float"): "fp8",
}
_PACKED_FORMATS = tuple(dict.fromkeys(name for name, _ in _LAYOUTS))


class _Fields:
    """The fields of an object of the config, which errors name."""

    def __init__(self, values: Any, where: str, place: str = "quantization_config") -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where}: {place} must be an object, got {values!r}")
        self._values, self._where, self.place = values, where, place

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; a null is an absent one."""
        value = self._values.get(name)
        return default if value is None else value

    def inner(self, name: str) -> "_Fields":
        return _Fields(self._values.get(name), self._where, f"{self.place}.{name}")

    def one_of(self, name: str, accepted: Sequence[Any], default: Any = None) -> Any:
        """Return a value that is one of those accepted. Raises ModelError."""
        value = self.get(name, default)
        if type(value) not in {type(each) for each in accepted} or value not in accepted:
            raise self.error(name, f"one of {', '.join(map(str, accepted))}", value)
        return value

    def whole(self, name: str, default: Any = None) -> int:
        """Return a whole number above zero, or -1. Raises ModelError."""
        value = self.get(name, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.error(name, "a whole number above 0, or -1", value)
        return value

    def pair(self, name: str) -> Grid:
        """Return a block's rows and columns. Raises ModelError."""
        value = self.get(name)
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(type(each) is int and each > 0 for each in value)
        ):
            raise self.error(name, "two whole numbers above 0", value)
        return Grid(*value)

    def absent(self, name: str) -> None:
        """Refuse a field that changes what the weights mean. Raises ModelError."""
        if value := self.get(name):
            raise self.error(name, "absent", value)

    def error(self, name: str, accepted: str, value: Any) -> ModelError:
        """Return an error that names the field, what it accepts, and its value."""
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
        return ModelError(f"{self._where}: {self.place}.{name} must be {accepted}, got {shown}")


def read_scheme(values: Any, model_type: str, where: str | Path) -> Scheme:
    """Return the scheme that a `quantization_config` states.

    Raises ModelError that names a field which is not read, its value, and what is accepted.
    """
    fields = _Fields(values, str(where))
    method = fields.get("quant_method")
    if isinstance(method, str) and method in _READERS:
        return _READERS[method](fields, model_type)
    accepted = f"one of {', '.join(_READERS)}"
    package = next((each.package for each in FORMATS if each.method == method), None)
    if package is None:
        raise fields.error("quant_method", accepted, method)
    raise ModelError(
        f"{fields.error('quant_method', accepted, method)}; that format needs the package "
        f"{package}, which is not used here: dequantise the checkpoint with it first"
    )


def _fp8(fields: _Fields, _: str) -> Scheme:
    """Read FP8 as DeepSeek, Qwen and Mistral publish it.

    Without `weight_block_size`, the scales show whether they are of blocks or of tensors.
    """
    fields.one_of("fmt", ("e4m3",), "e4m3")
    fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
    fields.one_of("expert_dtype", ("fp8",), "fp8")
    scheme = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    grids: tuple[Grid, ...] = (PER_TENSOR, _BLOCK)
    if fields.get("weight_block_size") is not None:
        grids = (fields.pair("weight_block_size"),)
    elif scheme == "static":
        grids = (PER_TENSOR,)
    return Scheme("fp8", (Group("fp8", 8, grids),), has_activations=True)


def _gptq(fields: _Fields, _: str) -> Scheme:
    """Read GPTQ: format 1 stores zero points minus one, format 2 as they are."""
    bits = fields.one_of("bits", (2, 4, 8))
    version = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    stored = fields.one_of(version, ("gptq", "gptq_v2"), "gptq")
    group = Group(
        "gptq",
        bits,
        (_groups(fields.whole("group_size", 128)),),
        has_zero_points=True,
        zero_offset=1 if stored == "gptq" else 0,
    )
    return Scheme("gptq", (group,))


def _awq(fields: _Fields, _: str) -> Scheme:
    bits = fields.one_of("bits", (4,), 4)
    version = str(fields.get("version", "gemm")).lower()
    if version != "gemm":
        raise fields.error("version", "gemm", version)
    fields.one_of("zero_point", (True,), default=True)
    grid = _groups(fields.whole("group_size", 128))
    return Scheme("awq", (Group("awq", bits, (grid,), has_zero_points=True),))


def _mxfp4(fields: _Fields, model_type: str) -> Scheme:
    if model_type != "gpt_oss":
        raise fields.error("quant_method", "mxfp4 only for model_type gpt_oss", model_type)
    return Scheme("mxfp4", (Group("mxfp4", 4, (Grid(1, 32),)),))


def _compressed(fields: _Fields, _: str) -> Scheme:
    """Read compressed-tensors: each group of modules has a scheme of its own.

    Published checkpoints with compressed tensors have either status.
    """
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    fields.absent("transform_config")
    if sparsity := fields.get("sparsity_config"):
        fields.inner("sparsity_config").one_of("format", ("dense",), sparsity.get("format"))
    named = fields.inner("config_groups")
    groups, has_activations = [], fields.get("kv_cache_scheme") is not None
    for name in fields.get("config_groups"):
        own = named.inner(name)
        stored = own.get("format") or fields.get("format")
        if stored not in _PACKED_FORMATS:
            place = own if own.get("format") else fields
            raise place.error("format", f"one of {', '.join(_PACKED_FORMATS)}", stored)
        groups.append(_compressed_group(own, stored))
        own.absent("output_activations")
        has_activations |= own.get("input_activations") is not None
    if not groups:
        raise fields.error("config_groups", "an object with a group", {})
    return Scheme("compressed-tensors", tuple(groups), has_activations)


def _compressed_group(own: _Fields, stored: str) -> Group:
    weights = own.inner("weights")
    kinds = tuple(kind for name, kind in _LAYOUTS if name == stored)
    kind = weights.one_of("type", kinds, "int")
    bits = weights.one_of("num_bits", (4, 8) if stored == "pack-quantized" else (8,))
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), implied)
    grids = {"tensor": PER_TENSOR, "channel": PER_ROW}
    if strategy == "block":
        grid = weights.pair("block_structure")
    else:
        grid = grids[strategy] if strategy in grids else _groups(weights.whole("group_size"))
    targets = own.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise own.error("targets", "a list of names", targets)
    for target in targets:
        if target.startswith(PATTERN):
            try:
                re.compile(target.removeprefix(PATTERN))
            except re.error as error:
                accepted = f"a list of names, and of patterns after {PATTERN} ({error})"
                raise own.error("targets", accepted, target) from error
    return Group(
        _LAYOUTS[stored, kind],
        bits,
        (grid,),
        has_zero_points=not weights.one_of("symmetric", (True, False), default=True),
        targets=tuple(targets),
    )


def _groups(size: int) -> Grid:
    return PER_ROW if size == -1 else Grid(1, size)


_READERS: Mapping[str, Callable[[_Fields, str], Scheme]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
