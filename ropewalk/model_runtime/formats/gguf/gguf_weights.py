"""The weights of a file under the names of transformers.

Shapes: H = heads, D = key dimensions, C = hidden size.
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.ggml import file_name_of
from ropewalk.model_runtime.formats.gguf.gguf_architectures import architecture_of
from ropewalk.model_runtime.formats.gguf.gguf_blocks import Blocks
from ropewalk.model_runtime.formats.gguf.gguf_file import GgufFile, TensorInfo
from ropewalk.model_runtime.formats.gguf.gguf_hybrids import DeltaSizes, Order, logs_of_rates
from ropewalk.model_runtime.formats.gguf.gguf_sizes import served_tensors
from ropewalk.model_runtime.formats.gguf.gguf_tensors import read_blocks, read_tensor

if TYPE_CHECKING:
    import torch

_HEAD = "lm_head.weight"
_RATES = ".A_log"  # the file has -exp of it
_GROUPED = ".in_proj_qkvz.weight"  # one weight in transformers, two tensors of newer files
_WITHOUT_OFFSET = ".linear_attn.norm.weight"
# The last part of a parameter's name -> the module and the suffix by which a file knows it.
_RENAMED = {
    "A_log": ("A_log", ""),
    "dt_bias": ("dt_proj", ".bias"),
    "expert_bias": ("expert_bias", ".bias"),
}
_FLOATS = ("F32", "F16", "BF16")
_HALVES = (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"))


class Weights:
    """The tensors of a file, for a model whose parameters have these names and shapes."""

    def __init__(
        self, file: GgufFile, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Compare names and shapes. Raises ModelError that names a tensor which does not fit."""
        self._file, self._config, self._shapes = file, config, shapes
        self._kind = architecture_of(file)
        self._sources = self._matched()
        used = {info.name for infos in self._sources.values() for info in infos}
        unread = sorted(set(served_tensors(file)) - used)
        if unread:
            raise ModelError(
                f"{file.path}: tensor {unread[0]} has no place in architecture "
                f"{file.architecture} with block_count {config['num_hidden_layers']}"
            )

    def infos(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the tensors that make a parameter: several are joined by rows."""
        return self._sources.get(name, ())

    def blocks(self, name: str, part: int = 0) -> Iterator[tuple[int, Blocks]]:
        """Yield the first row and the unpacked numbers of pieces of one tensor of a parameter.

        A tensor alone has the model's order of rows; `order_left` tells what is left.
        """
        infos = self._sources[name]
        is_alone = len(infos) == 1
        return read_blocks(infos[part], self._order(name).rows_R if is_alone else None)

    def order_left(self, name: str, *, in_bits: bool) -> Order:
        """Return the order that a linear must give what it reads and writes.

        `in_bits`: its weight stays in the bits of the file. Blocks lie along the columns, so these
        keep the order of the file. They keep it as floats, too, because an output sums over them,
        and both must give the same bits.
        """
        infos = self.infos(name)
        if not infos:
            return Order()
        rows_R, columns_K = self._order(name)
        has_blocks = infos[0].type_name not in _FLOATS
        return Order(
            rows_R if in_bits and len(infos) > 1 else None, columns_K if has_blocks else None
        )

    def types_of(self, name: str) -> tuple[str, ...]:
        """Return the types of the tensors that are joined to a parameter."""
        return tuple(each.type_name for each in self.infos(name))

    def expert_blocks(self, name: str, part: int, expert: int) -> Iterator[tuple[int, Blocks]]:
        """Yield the first row and the numbers of pieces of one expert, of one joined tensor."""
        info = self._sources[name][part]
        num_rows = info.shape[-2]
        return read_blocks(info, of=range(expert * num_rows, (expert + 1) * num_rows))

    def read(
        self, dtype: "torch.dtype", *, without: Container[str] = ()
    ) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield names of transformers and tensors in a number type. Raises ModelError.

        Parameters in `without` are left out.
        """
        for name, infos in self._sources.items():
            if name not in without:
                read = self._logarithms if name.endswith(_RATES) else self._values
                yield name, read(name, infos, dtype).reshape(self._shapes[name])

    def _values(
        self, name: str, infos: tuple[TensorInfo, ...], dtype: "torch.dtype"
    ) -> "torch.Tensor":
        import torch  # noqa: PLC0415

        is_offset = name.endswith("norm.weight") and not name.endswith(_WITHOUT_OFFSET)
        offset = -self._kind.norm_offset if is_offset else 0.0
        rows_R, columns_K = self._order(name)
        if infos[0].type_name not in _FLOATS:
            columns_K = None  # see `order_left`
        if len(infos) == 1:
            found = read_tensor(infos[0], dtype, row_order=rows_R, offset=offset)
        else:
            found = torch.cat([read_tensor(each, dtype) for each in infos], dim=-2)
            found = found if rows_R is None else found[torch.from_numpy(rows_R)]
        return found if columns_K is None else found[:, torch.from_numpy(columns_K)]

    def _logarithms(
        self, name: str, infos: tuple[TensorInfo, ...], dtype: "torch.dtype"
    ) -> "torch.Tensor":
        import torch  # noqa: PLC0415

        rates_H = self._values(name, infos, torch.float32)
        wrong = rates_H[~((rates_H <= 0) & rates_H.isfinite())]
        if len(wrong):
            raise ModelError(
                f"{infos[0].path}: tensor {infos[0].name} must have finite numbers of at most 0, "
                f"got {float(wrong[0]):g}"
            )
        return logs_of_rates(rates_H).to(dtype)

    def _order(self, name: str) -> Order:
        """Return the row and the column of the file for each of a parameter's."""
        if ".linear_attn." in name:
            sizes = DeltaSizes.of(self._config)
            if len(self._sources[name]) == 1 and name.endswith(_GROUPED):
                return Order()  # an older file has the rows of transformers
            return sizes.order(name, are_tiled=self._kind.are_value_heads_tiled)
        if self._kind.are_pairs_adjacent:
            for part, heads in _HALVES:
                if f".{part}." in name:
                    return Order(half_split_rows(self._config[heads], self._config["head_dim"]))
        return Order()

    def _matched(self) -> dict[str, tuple[TensorInfo, ...]]:
        own_name = file_name_of(self._file.architecture, self._config["num_hidden_layers"])
        found = {}
        for name, shape in self._shapes.items():
            if name == _HEAD and self._config["tie_word_embeddings"]:
                continue
            names = _file_names(name, own_name, self._file.tensors)
            infos = tuple(self._info(each, name) for each in names)
            _check_shape(infos, name, shape)
            found[name] = infos
        return found

    def _info(self, file_name: str, name: str) -> TensorInfo:
        info = self._file.tensors.get(file_name)
        if info is None:
            raise ModelError(
                f"{self._file.path} has no tensor {file_name}, which architecture "
                f"{self._file.architecture} needs for {name}"
            )
        return info


def half_split_rows(num_heads: int, head_dim: int) -> "np.ndarray[Any, Any]":
    """Return the rows [H*D] of a file with adjacent pairs, in the order with split halves."""
    rows_HPx2 = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return np.ascontiguousarray(rows_HPx2.swapaxes(1, 2)).reshape(-1)


def _file_names(name: str, own_name: Any, tensors: Container[str]) -> list[str]:
    """Return the tensors of a file that make a parameter: several are joined by rows."""
    module, _, suffix = name.rpartition(".")
    if suffix == "gate_up_proj" and module.endswith("experts"):
        parts = [own_name(f"{module}.{each}") for each in ("gate_proj", "up_proj")]
        return [f"{part}.weight" for part in parts]
    if name.endswith(_GROUPED) and f"{own_name(module)}.weight" not in tensors:
        parts = [own_name(module.removesuffix("qkvz") + each) for each in ("qkv", "z")]
        return [f"{part}.weight" for part in parts]
    if suffix in _RENAMED:
        part, suffix = _RENAMED[suffix]
        found = own_name(f"{module}.{part}")
        return [f"{found or module}{suffix}"]
    if suffix not in ("weight", "bias"):
        module, suffix = name, "weight"
    found = own_name(module)
    return [f"{found or module}.{suffix}"]


def _check_shape(infos: tuple[TensorInfo, ...], name: str, shape: tuple[int, ...]) -> None:
    shapes = [each.shape for each in infos]
    joined = shapes[0]
    if len(shapes) > 1:
        rows = sum(each[-2] for each in shapes)
        joined = (*shapes[0][:-2], rows, shapes[0][-1])
    if _without_ones(joined) != _without_ones(shape):
        raise ModelError(
            f"{infos[0].path}: tensor {infos[0].name} has shape {list(joined)}, the metadata give "
            f"{list(shape)} for {name}"
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as converters write it: the channels of a convolution are no dimension."""
    return tuple(each for each in shape if each != 1)


_PROJECTOR = "mmproj"  # llama.cpp's prefix of files that hold an image encoder only


def find_gguf(source: str | Path, gguf_file: str | None = None) -> Path | None:
    """Return the file that a path means, or None if it is no GGUF model.

    `source` is a file, or a folder with one model in GGUF and no safetensors. `gguf_file` is the
    name of a file in the folder. Raises ModelError that names what to do.
    """
    path = Path(source)
    if path.is_file():
        return _file(path, gguf_file)
    if gguf_file is not None:
        if not path.is_dir():
            raise ModelError(
                f"gguf_file is {gguf_file}, but {source} is no folder here; download the file and "
                "name its path as the model"
            )
        if not (path / gguf_file).is_file():
            raise ModelError(f"{path} has no file {gguf_file} (gguf_file)")
        return _file(path / gguf_file, None)
    if path.suffix == ".gguf" and not path.is_dir():
        raise ModelError(f"there is no file {source}")
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return _only(path)


def _file(path: Path, gguf_file: str | None) -> Path:
    from ropewalk.model_runtime.formats.gguf.gguf_file import (  # noqa: PLC0415  # needs numpy
        MAGIC,
        first_part,
        is_gguf,
    )

    if gguf_file is not None:
        raise ModelError(f"{path} is a file already, so gguf_file must not be set")
    try:
        begins_well = is_gguf(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if not begins_well:
        raise ModelError(
            f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}; name a GGUF file or "
            "a model folder"
        )
    first = first_part(path)
    if not first.is_file():
        raise ModelError(f"{path} is a part of a split model, and {first.name} is not beside it")
    return first


def _only(folder: Path) -> Path | None:
    """Return the one model of a folder; parts of a split file count once."""
    files = (path for path in folder.glob("*.gguf") if path.is_file() or path.is_dir())
    found = sorted(path for path in files if not path.name.startswith(_PROJECTOR))
    if not found:
        return None
    from ropewalk.model_runtime.formats.gguf.gguf_file import first_part  # noqa: PLC0415

    models = {first_part(path): path for path in found}
    if len(models) > 1:
        names = ", ".join(path.name for path in sorted(models)[:8])
        raise ModelError(
            f"{folder} has {len(models)} GGUF models ({names}); choose one with gguf_file"
        )
    return _file(found[0], None)
