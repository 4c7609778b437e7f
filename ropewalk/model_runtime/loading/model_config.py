"""Read tables, cache shapes and sizes from a checkpoint's config, before weights are loaded.

torch and transformers are imported where a config cannot be read without them.
"""
# ruff: noqa: PLC0415

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_weights import find_gguf
from ropewalk.model_runtime.formats.quantised_inventory import read_inventory, refuse_unstated
from ropewalk.model_runtime.formats.quantised_scheme import Scheme
from ropewalk.model_runtime.formats.read_scheme import read_scheme
from ropewalk.model_runtime.loading.files.folder_files import (
    check_files,
    check_index,
    weight_files,
)
from ropewalk.model_runtime.loading.plain_config import (
    NO_GPU,
    PlainDevice,
    PlainNumberType,
    gguf_num_parameters,
    gguf_plain_config,
    gguf_storage,
    plain_config,
    plain_device,
    plain_number_type,
    refuse_states_elsewhere,
    served_values,
    state_shapes,
    text_values,
    torch_dtype,
)
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import NativeRope, RopeConfigError, native_rope

if TYPE_CHECKING:
    import torch

_SLIDING = "sliding_attention"  # the type of layers that read a window
EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded_model"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The cached values of one token in one attention layer."""

    num_key_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint that was found and can be loaded."""

    source: str | Path
    config: Any  # the config object of transformers, or a PlainConfig
    dtype: "torch.dtype | PlainNumberType"
    device: "torch.device | PlainDevice"
    has_weights: bool = True  # False: a folder of config and tokenizer only
    stored: Scheme | None = None  # how the files store the weights, if they are quantised
    left_out: tuple[str, ...] = ()  # parts that text does not pass, such as an image tower

    @property
    def architecture(self) -> str:
        """Return the name of the class that transformers will create."""
        named = self.config.architectures
        return str(named[0] if named else self.config.model_type)

    def native(self) -> NativeRope:
        """Return its rotary tables. Raises ModelError."""
        values = served_values(self.architecture, self.config)
        refuse_states_elsewhere(self.architecture, values, self.device)
        try:
            return native_rope(values)
        except RopeConfigError as error:
            raise ModelError(f"{self.architecture}: {error}") from error

    def layers(self) -> Mapping[int, KVShape]:
        """Return the config's cache shapes by layer index. Raises ModelError if they are absent.

        Probing the loaded model finds the same shapes for the architectures in docs/models.md, but
        for JetMoE and MiMo V2. Another architecture may have different shapes in some layers, too.
        For it the result is wrong until the model is loaded.
        """
        values = text_values(self.config)
        # Only layers that differ from the others are here (Gemma 4).
        own = {int(key): each for key, each in (values.get("per_layer_config") or {}).items()}
        states = self.states()
        shapes = {
            index: self._shape({**values, **own.get(index, {})})
            for index in range(self._number("num_hidden_layers", values))
            if index not in states
        }
        if not shapes:
            raise ModelError(f"{self.architecture}: layer_types has no layer with attention")
        return shapes

    def windows(self) -> Mapping[int, int | None]:
        """Return the keys that each layer reads, by index; None: all.

        Probing the loaded model finds the same windows for the architectures in docs/models.md.
        For another one the result may be wrong until the model is loaded.
        """
        values = text_values(self.config)
        window, types = values.get("sliding_window"), values.get("layer_types")
        if type(window) is not int or window < 1 or values.get("use_sliding_window") is False:
            return dict.fromkeys(self.layers())
        if isinstance(types, list | tuple):
            return {
                index: window if types[index : index + 1] in ([_SLIDING], (_SLIDING,)) else None
                for index in self.layers()
            }
        # With `use_sliding_window`, the first layers may read all keys.
        first = (values.get("max_window_layers") or 0) if values.get("use_sliding_window") else 0
        return {index: window if index >= first else None for index in self.layers()}

    def states(self) -> Mapping[int, StateShape]:
        """Return the shapes of its layers' states by index; empty for a model without them."""
        return state_shapes(text_values(self.config))

    def num_parameters(self) -> int | None:
        """Return the number of parameters in the weight files; None without such files."""
        folder = Path(self.source)
        if folder.is_file():
            return gguf_num_parameters(folder)
        if not self.has_weights:
            return None
        return sum(math.prod(shape) for _, shape in self.weight_shapes())

    def weight_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the weights that a load reads from a folder's files."""
        beside = re.compile(rf"(model\.)?({'|'.join(self.left_out)})\.") if self.left_out else None
        for name, shape in self._stored_shapes():
            if beside is None or not beside.match(name):
                yield name, shape

    def _stored_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        files = weight_files(Path(self.source))
        if self.stored is not None:
            inventory = read_inventory(files, self.stored)
            yield from ((each.name, tuple(each.shape)) for each in inventory.quantised)
            yield from ((each.name, tuple(each.shape)) for each in inventory.plain)
            return
        for path in files:
            with safe_open(path, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, tuple(opened.get_slice(name).get_shape())

    def gguf_storage(self) -> tuple[int, str] | None:
        """Return a GGUF file's size in bytes and its number types; None for other weights."""
        path = Path(self.source)
        return gguf_storage(path) if path.is_file() else None

    def num_weight_bytes(self) -> int | None:
        """Return the bytes that loaded weights hold in the served dtype; None without files."""
        num_parameters = self.num_parameters()
        if num_parameters is None:
            return None
        return num_parameters * self.dtype.itemsize + self.num_tied_head_bytes()

    def num_stored_bytes(self) -> int | None:
        """Return the size of a quantised checkpoint's weight files; None for any other source."""
        folder = Path(self.source)
        if self.stored is None or not self.has_weights:
            return None
        return sum(path.stat().st_size for path in weight_files(folder))

    @property
    def is_tied(self) -> bool:
        """Return whether the head has the weight of the embedding."""
        config = self.config
        if config is not self._text_config:
            from ropewalk.model_runtime.loading.text_part import config_of_model

            config = config_of_model(config)
        return bool(getattr(config, "tie_word_embeddings", False))

    def num_tied_head_bytes(self) -> int:
        """Return the bytes of the packed copy of a tied head; 0 without one.

        On a CPU each linear is packed. A tied head shares its weight with the embedding, which
        looks up rows and keeps the original, so the head's packed weight is a copy.
        """
        if self.device.type != "cpu" or not self.is_tied:
            return 0
        return self._number("vocab_size") * self._number("hidden_size") * self.dtype.itemsize

    def _shape(self, values: Mapping[str, Any]) -> KVShape:
        """Return the cache's shape of one layer with these values of the config."""
        num_heads = self._number("num_attention_heads", values)
        if values.get("kv_lora_rank"):
            # Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) is cached by its heads.
            key_dim = self._number("qk_nope_head_dim", values)
            key_dim += self._number("qk_rope_head_dim", values)
            return KVShape(num_heads, key_dim, self._number("v_head_dim", values))
        num_key_heads = num_heads
        if values.get("num_key_value_heads") is not None:
            num_key_heads = self._number("num_key_value_heads", values)
        head_dim = values.get("head_dim")
        head_dim = head_dim or self._number("hidden_size", values) // num_heads
        return KVShape(num_key_heads, head_dim, values.get("v_head_dim") or head_dim)

    def _number(self, name: str, values: Mapping[str, Any] | None = None) -> int:
        value = getattr(self._text_config, name, None) if values is None else values.get(name)
        if not isinstance(value, int):
            raise ModelError(f"{self.architecture}: the config's {name} is not one number")
        return value

    @property
    def _text_config(self) -> Any:
        return self.config.get_text_config()


def read_outline(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    has_weights: bool = True,
) -> ModelConfig:
    """Find a checkpoint and read its config without torch and transformers if it is a plain one.

    `has_weights` False means a folder without weights, which a hub id has before its download.

    Raises ModelError that names the problem.
    """
    found = read_plain_outline(source, dtype=dtype, device=device, has_weights=has_weights)
    return found or read_model_config(
        source,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        has_weights=has_weights,
    )


def read_plain_outline(
    source: str | Path, *, dtype: str = "auto", device: str = "auto", has_weights: bool = True
) -> ModelConfig | None:
    """Read a config without torch; return None if it is no plain one. Raises ModelError."""
    where, number_type = plain_device(device), plain_number_type(dtype)
    path = find_gguf(source) if has_weights else None
    if where is not None and number_type is not None and path is not None:
        return ModelConfig(path, gguf_plain_config(path), number_type, where)
    if where is not None and number_type is not None and Path(source).is_dir():
        check_files(Path(source), has_weights=has_weights)
        config = plain_config(Path(source))
        if config is not None:
            stored = _take_scheme(config, source, has_weights=has_weights)
            return ModelConfig(source, config, number_type, where, has_weights, stored)
    return None


def read_model_config(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    has_weights: bool = True,
) -> ModelConfig:
    """Find a checkpoint and read its config. Raises ModelError that names the problem."""
    from transformers import AutoConfig

    from ropewalk.model_runtime.loading.files.pretrained import from_pretrained, guarded
    from ropewalk.model_runtime.loading.text_part import parts_left_out

    where = torch_device(device)
    if has_weights and (path := find_gguf(source)) is not None:
        from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config

        config = gguf_config(path)
        return ModelConfig(path, config, torch_dtype(dtype, config, where), where)
    folder = Path(source)
    if not folder.is_dir():  # a hub id is a folder of the cache by now
        raise ModelError(f"there is no folder {source}")
    check_files(folder, has_weights=has_weights)
    config = from_pretrained(AutoConfig, source, trust_remote_code=trust_remote_code)
    stored = _take_scheme(config, source, has_weights=has_weights)
    number_type = torch_dtype(dtype, config, where)
    left_out = guarded(source, lambda: parts_left_out(config))
    return ModelConfig(source, config, number_type, where, has_weights, stored, left_out)


def _take_scheme(config: Any, source: str | Path, *, has_weights: bool) -> Scheme | None:
    """Remove `quantization_config` from a config, and return what it states. Raises ModelError.

    transformers would cast FP8 weights without their scales, so these need a statement.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        if has_weights:
            check_index(Path(source))
            refuse_unstated(weight_files(Path(source)))
        return None
    del config.quantization_config
    if hasattr(stated, "to_dict"):
        stated = stated.to_dict()
    if not isinstance(stated, Mapping):
        raise ModelError(f"{source}: quantization_config must be an object, got {stated!r}")
    return read_scheme(stated, config.model_type, source)


def torch_device(name: str) -> "torch.device":
    """Return the device of a setting's name. Raises ModelError for a GPU that is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ModelError(f"device is {name}, but {NO_GPU}")
    if not index:
        return torch.device(kind)
    found = torch.cuda.device_count()
    if int(index) >= found:
        known = "cuda:0 only" if found == 1 else f"cuda:0 to cuda:{found - 1}"
        raise ModelError(f"device is {name}, but torch finds {known}")
    return torch.device(kind, int(index))
