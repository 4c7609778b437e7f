"""Read a checkpoint up to its weights: config, tables, cache shapes and the model without memory.

`config check`, `inspect` and the load of `serve` all read it here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_sizes import storage_of
from ropewalk.model_runtime.formats.gguf.gguf_weights import find_gguf
from ropewalk.model_runtime.formats.quantised_inventory import read_inventory, refuse_unstated
from ropewalk.model_runtime.formats.quantised_scheme import Scheme
from ropewalk.model_runtime.formats.read_scheme import read_scheme
from ropewalk.model_runtime.loading.config_values import (
    refuse_states_elsewhere,
    state_shapes,
    text_values,
)
from ropewalk.model_runtime.loading.files.folder_files import (
    check_files,
    check_index,
    weight_files,
)
from ropewalk.model_runtime.loading.files.gguf_checkpoint import gguf_config
from ropewalk.model_runtime.loading.files.pretrained import from_pretrained, guarded
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.text_part import empty_model, parts_left_out
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import NativeRope

_SLIDING = "sliding_attention"  # the type of layers that read a window
EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded_model"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The cached values of one token in one attention layer."""

    num_key_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint that was found and can be loaded."""

    source: str | Path
    config: Any  # the config object of transformers
    dtype: torch.dtype
    device: torch.device
    has_weights: bool = True  # False: a folder of config and tokenizer only
    stored: Scheme | None = None  # how the files store the weights, if they are quantised
    left_out: tuple[str, ...] = ()  # parts that text does not pass, such as an image tower
    trust_remote_code: bool = False

    @cached_property
    def empty(self) -> Any:
        """Return the model that a load makes, without memory. Raises ModelError."""
        return guarded(
            self.source,
            lambda: empty_model(self.config, trust_remote_code=self.trust_remote_code),
        )

    @property
    def architecture(self) -> str:
        """Return the name of the class that transformers creates. Raises ModelError."""
        return type(self.empty).__name__

    def native(self) -> NativeRope:
        """Return its rotary tables. Raises ModelError."""
        refuse_states_elsewhere(self.architecture, text_values(self.config), self.device)
        return read_native_rope(self.empty)

    def layers(self) -> Mapping[int, KVShape]:
        """Return the config's cache shapes by layer index. Raises ModelError if they are absent.

        Probing the loaded model finds the same shapes for the architectures in
        docs/reference/models.md, but for JetMoE and MiMo V2. Another architecture may have
        different shapes in some layers, too. For it the result is wrong until the model is loaded.
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

        Probing the loaded model finds the same windows for the architectures in
        docs/reference/models.md.
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

    def cache_layout(self, page_size: int, kv_cache_dtype: str, num_ranks: int = 1) -> CacheLayout:
        """Return the layout of its cache, whose heads the ranks share. Raises ModelError."""
        layers = {
            index: replace(each, num_key_heads=each.num_key_heads // num_ranks)
            for index, each in self.layers().items()
        }
        form = self.dtype, page_size, kv_cache_dtype
        return CacheLayout(layers, *form, states=self.states(), num_ranks=num_ranks)

    def num_parameters(self) -> int:
        """Return the number of weights that a load reads; a tied head counts once."""
        held = {id(each): each for each in self.empty.state_dict(keep_vars=True).values()}
        return sum(each.numel() for each in held.values())

    def gguf_storage(self) -> tuple[int, str] | None:
        """Return a GGUF file's size in bytes and its number types; None for other weights."""
        path = Path(self.source)
        return storage_of(read_gguf(path)) if path.is_file() else None

    def num_weight_bytes(self) -> int:
        """Return the bytes that loaded weights hold in the served dtype."""
        return self.num_parameters() * self.dtype.itemsize + self.num_tied_head_bytes()

    def num_stored_bytes(self) -> int | None:
        """Return the size of a quantised checkpoint's weight files; None for any other source."""
        folder = Path(self.source)
        if self.stored is None or not self.has_weights:
            return None
        return sum(path.stat().st_size for path in weight_files(folder))

    def num_tied_head_bytes(self) -> int:
        """Return the bytes of the packed copy of a tied head; 0 without one.

        On a CPU each linear is packed. A tied head shares its weight with the embedding, which
        looks up rows and keeps the original, so the head's packed weight is a copy.
        """
        head = self.empty.get_output_embeddings()
        is_tied = head is not None and head.weight is self.empty.get_input_embeddings().weight
        has_copy = is_tied and self.device.type == "cpu"
        return head.weight.numel() * self.dtype.itemsize if has_copy else 0

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

    def _number(self, name: str, values: Mapping[str, Any]) -> int:
        value = values.get(name)
        if not isinstance(value, int):
            raise ModelError(f"{self.config.model_type}: the config's {name} is not one number")
        return value


def read_model_config(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    has_weights: bool = True,
) -> ModelConfig:
    """Find a checkpoint and read its config. Raises ModelError that names the problem.

    `device`: a setting's name, or a device, which need not be here.
    """
    where = torch_device(device) if isinstance(device, str) else device
    if has_weights and (path := find_gguf(source)) is not None:
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
    parts = has_weights, stored, left_out, trust_remote_code
    return ModelConfig(source, config, number_type, where, *parts)


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
    scheme = read_scheme(stated, config.model_type, source)
    if has_weights:
        read_inventory(weight_files(Path(source)), scheme)  # for its refusals
    return scheme


def torch_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto`: float32 on a CPU, the checkpoint's own dtype elsewhere."""
    if name == "auto":
        own: torch.dtype = getattr(config, "dtype", None) or torch.float32
        return torch.float32 if device.type == "cpu" else own
    if name == "float16" and device.type == "cpu":
        raise ModelError("dtype float16 is not served on a CPU; use float32 or bfloat16")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def torch_device(name: str) -> torch.device:
    """Return the device of a setting's name. Raises ModelError for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ModelError(f"device is {name}, but torch finds no CUDA device here")
    if not index:
        return torch.device(kind)
    found = torch.cuda.device_count()
    if int(index) >= found:
        known = "cuda:0 only" if found == 1 else f"cuda:0 to cuda:{found - 1}"
        raise ModelError(f"device is {name}, but torch finds {known}")
    return torch.device(kind, int(index))
