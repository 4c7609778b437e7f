"""The weights of a file under the names of transformers.

Shapes: H = heads, D = key dimensions, C = hidden size.
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.ggml import file_name_of
from ropewalk.model_runtime.formats.gguf_architectures import architecture_of
from ropewalk.model_runtime.formats.gguf_blocks import Blocks, read_blocks, read_tensor
from ropewalk.model_runtime.formats.gguf_config import ROPE_TENSORS
from ropewalk.model_runtime.formats.gguf_file import GgufFile, TensorInfo

if TYPE_CHECKING:
    import torch

_HEAD = "lm_head.weight"


class Weights:
    """The tensors of a file, for a model whose parameters have these names and shapes."""

    def __init__(
        self, file: GgufFile, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Compare names and shapes. Raises ModelError that names a tensor which does not fit."""
        self._file, self._config = file, config
        self._kind = architecture_of(file)
        self._sources = self._matched(shapes)
        used = {info.name for infos in self._sources.values() for info in infos}
        unread = sorted(set(file.tensors) - used - ROPE_TENSORS)
        if unread:
            raise ModelError(
                f"{file.path}: tensor {unread[0]} has no place in architecture "
                f"{file.architecture} with block_count {config['num_hidden_layers']}"
            )

    def type_of(self, name: str) -> str | None:
        """Return the type in which a parameter is stored; None if it is joined from several."""
        infos = self._sources.get(name, ())
        return infos[0].type_name if len(infos) == 1 else None

    def blocks(self, name: str) -> Iterator[tuple[int, Blocks]]:
        """Yield the first row and the unpacked numbers of pieces of a parameter."""
        (info,) = self._sources[name]
        return read_blocks(info, self._row_order(name))

    def types_of(self, name: str) -> tuple[str, ...]:
        """Return the types of the tensors that are joined to a parameter."""
        return tuple(each.type_name for each in self._sources.get(name, ()))

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
        import torch  # noqa: PLC0415

        for name, infos in self._sources.items():
            if name in without:
                continue
            offset = -self._kind.norm_offset if name.endswith("norm.weight") else 0.0
            order = self._row_order(name)
            found = [read_tensor(each, dtype, row_order=order, offset=offset) for each in infos]
            yield name, found[0] if len(found) == 1 else torch.cat(found, dim=-2)

    def _matched(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[TensorInfo, ...]]:
        own_name = file_name_of(self._file.architecture, self._config["num_hidden_layers"])
        found = {}
        for name, shape in shapes.items():
            if name == _HEAD and self._config["tie_word_embeddings"]:
                continue
            infos = tuple(self._info(each, name) for each in _file_names(name, own_name))
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

    def _row_order(self, name: str) -> "np.ndarray[Any, Any] | None":
        """Return the row of the file for each row of q and k; None if they are the same."""
        if not self._kind.are_pairs_adjacent:
            return None
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                return half_split_rows(self._config[heads], self._config["head_dim"])
        return None


def half_split_rows(num_heads: int, head_dim: int) -> "np.ndarray[Any, Any]":
    """Return the rows [H*D] of a file with adjacent pairs, in the order with split halves."""
    rows_HPx2 = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return np.ascontiguousarray(rows_HPx2.swapaxes(1, 2)).reshape(-1)


def _file_names(name: str, own_name: Any) -> list[str]:
    """Return the tensors of a file that make a parameter: several are joined by rows."""
    module, _, suffix = name.rpartition(".")
    if suffix == "gate_up_proj" and module.endswith("experts"):
        parts = [own_name(f"{module}.{each}") for each in ("gate_proj", "up_proj")]
        return [f"{part}.weight" for part in parts]
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
    if joined != shape:
        raise ModelError(
            f"{infos[0].path}: tensor {infos[0].name} has shape {list(joined)}, the metadata give "
            f"{list(shape)} for {name}"
        )


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
    from ropewalk.model_runtime.formats.gguf_file import (  # noqa: PLC0415  # needs numpy
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
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_PROJECTOR))
    if not found:
        return None
    from ropewalk.model_runtime.formats.gguf_file import first_part  # noqa: PLC0415

    models = {first_part(path): path for path in found}
    if len(models) > 1:
        names = ", ".join(path.name for path in sorted(models)[:8])
        raise ModelError(
            f"{folder} holds {len(models)} GGUF models ({names}); choose one with gguf_file"
        )
    return _file(found[0], None)
