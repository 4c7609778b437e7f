"""A checkpoint's config, number type and device without torch and transformers.

`config check` and `inspect` import neither where config.json states every value that they need.
For everything else, the functions return None, and transformers reads the config.
"""

import ctypes
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.config_limits import impossible
from ropewalk.model_runtime.gpu_nodes import GPU_NODES, has_gpu_kernels, is_there
from ropewalk.model_runtime.json_files import read_object
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.model_runtime.text.sample_text import SAMPLE_TEXT

# transformers reads the configs of these types as they are written. The tests compare both ways.
PLAIN_TYPES = frozenset(
    {"apertus", "arcee", "ernie4_5", "granite", "llama", "mistral", "olmo2"}
    | {"qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"}
)
# These may have defaults of their own, so a config must state them.
_NEEDED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    *("max_position_embeddings", "vocab_size"),
)
NO_FLOAT16 = "dtype float16 is not served on a CPU; use float32 or bfloat16"
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad"))
NO_GPU = "torch finds no CUDA device here"
_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PlainNumberType:
    """A number type of torch by its name."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class PlainDevice:
    """The CPU, where nothing of torch is needed to say so."""

    type: Literal["cpu"] = "cpu"

    def __str__(self) -> str:
        return self.type


class PlainConfig:
    """A config.json with the attributes and methods of transformers' config that planning uses."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __delattr__(self, name: str) -> None:
        del self._values[name]

    def get_text_config(self) -> "PlainConfig":
        """Return itself: a config with parts is not plain."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the values as they are in the file."""
        return dict(self._values)


def plain_config(folder: Path) -> PlainConfig | None:
    """Read a folder's config.json; None if transformers must read it. Raises ModelError."""
    values = read_object(folder / "config.json")
    if values is None or values.get("model_type") not in PLAIN_TYPES:
        return None
    if not all(type(values.get(name)) is int for name in _NEEDED):
        return None
    block = _rope_block(values)
    if block is None:
        return None
    is_plain = (
        isinstance(values.get("architectures"), list)
        and isinstance(values.get("tie_word_embeddings"), bool)
        and "auto_map" not in values
        and type(values.get("head_dim", 1)) is int
        and isinstance(values.get("eos_token_id"), int | list | None)
        and "partial_rotary_factor" not in {*block, *values}
    )
    return PlainConfig(values) if is_plain else None


def gguf_plain_config(path: Path) -> PlainConfig:
    """Return a GGUF file's config. Raises ModelError."""
    from ropewalk.model_runtime.formats.gguf.gguf_architectures import (  # noqa: PLC0415  # needs numpy
        config_of,
    )
    from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415

    return PlainConfig(config_of(read_gguf(path)))


def gguf_num_parameters(path: Path) -> int:
    """Return the number of weights in a GGUF file. Raises ModelError."""
    from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415
    from ropewalk.model_runtime.formats.gguf.gguf_sizes import num_parameters  # noqa: PLC0415

    return num_parameters(read_gguf(path))


def gguf_storage(path: Path) -> tuple[int, str]:
    """Return a GGUF file's size in bytes and its number types. Raises ModelError."""
    from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415
    from ropewalk.model_runtime.formats.gguf.gguf_sizes import storage_of  # noqa: PLC0415

    return storage_of(read_gguf(path))


def _rope_block(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a stated rope block of transformers 5 or 4; None if it is neither or lacks a part."""
    block = values.get("rope_parameters")
    if block is None and isinstance(values.get("rope_theta"), int | float):
        if values.get("rope_scaling") is None:
            return {}
        if not isinstance(values["rope_scaling"], Mapping):
            return None
        block = {"rope_theta": values["rope_theta"], **values["rope_scaling"]}
    if not isinstance(block, Mapping) or not {"rope_theta", "rope_type"} <= set(block):
        return None
    if block["rope_type"] != "default" and "factor" not in block:  # transformers refuses most
        return None
    return block


def plain_number_type(name: str) -> PlainNumberType | None:
    """Return the number type that a setting means on a CPU; None if a CPU does not serve it."""
    name = "float32" if name == "auto" else name
    return PlainNumberType(name, _ITEM_SIZES[name]) if name in ("float32", "bfloat16") else None


def plain_device(name: str) -> PlainDevice | None:
    """Return the CPU if a setting means it for sure; None if torch must look for a GPU."""
    if name == "cpu" or (name == "auto" and not _may_have_gpu()):
        return PlainDevice()
    return None


def refuse_absent(device: str, dtype: str) -> None:
    """Raise ModelError for a device or number type that this machine cannot have.

    Only torch knows the rest, for example which GPUs there are.
    """
    if dtype == "float16" and plain_device(device) is not None:
        raise ModelError(NO_FLOAT16)
    if device.startswith("cuda") and sys.platform == "linux" and not is_there(GPU_NODES):
        try:
            ctypes.CDLL("libcuda.so.1")  # some systems have the driver without those nodes
        except OSError:
            raise ModelError(f"device is {device}, but {NO_GPU}") from None


def plain_templates(folder: Path) -> dict[str, str] | None:
    """Return the chat templates of a folder's tokenizer by name; None if it is not plain.

    A tokenizer without a template gives {}. `folder` may be a GGUF file.
    """
    if folder.is_file():
        from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415
        from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import read_tokenizer  # noqa: PLC0415

        return read_tokenizer(read_gguf(folder)).chat_templates
    config = read_object(folder / "tokenizer_config.json")
    if config is None or not _has_plain_tokens(folder, config):
        return None
    return written_templates(folder) if _is_tokenizer(folder / "tokenizer.json") else None


def _has_plain_tokens(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer's special tokens are as transformers writes them."""
    files = (folder / "special_tokens_map.json", folder / "added_tokens.json")
    is_read = all(read_object(each) is not None for each in files if each.exists())
    has_tokens = all(_is_token(config.get(name)) for name in _SPECIAL_TOKENS)
    return is_read and has_tokens and "auto_map" not in config


def written_templates(folder: Path) -> dict[str, str] | None:
    """Return what `plain_templates` does of a folder, without a look at its tokens."""
    default = folder / "chat_template.jinja"
    files = {"default": default} if default.is_file() else {}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if files:  # then transformers reads none of tokenizer_config.json
        try:
            return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        except (OSError, UnicodeDecodeError):
            return None
    found = (read_object(folder / "tokenizer_config.json") or {}).get("chat_template")
    if found is None:
        return {}
    named = [{"name": "default", "template": found}] if isinstance(found, str) else found
    if not isinstance(named, list) or not all(_is_named_template(each) for each in named):
        return None
    return {each["name"]: each["template"] for each in named}


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("name", "template")
    )


def _is_token(stated: object) -> bool:
    """Return whether a value is a special token as transformers writes it, or none."""
    text = stated.get("content") if isinstance(stated, dict) else stated
    return isinstance(text, str) or stated is None


def _is_tokenizer(path: Path) -> bool:
    from tokenizers import Tokenizer  # noqa: PLC0415  # `inspect` reads no tokenizer

    try:
        Tokenizer.from_file(str(path)).encode_batch_fast([SAMPLE_TEXT])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001  # the library raises Exception itself, or panics
        return False
    return True


def _may_have_gpu() -> bool:
    """Return whether torch might find a GPU: its build and the machine both have to allow one."""
    if sys.platform == "linux" and not is_there(GPU_NODES):
        return False
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    try:
        lines = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    builds = [line for line in lines if line.startswith(("cuda", "hip"))]
    return not builds or not all(line.endswith("= None") for line in builds)


# The values of a model's config that describe its text decoder, and those that refuse it.
#
# The self-check's prompts have 48 tokens. Attention that changes later, after thousands of tokens,
# looks right to it. So such attention is recognised by the fields of the config.

if TYPE_CHECKING:
    import torch

_BY_INDEX = "an index chooses the keys that a query sees"
NO_ROTATION = "has no rotary position embeddings that can be patched"
# A field that is set -> the attention that it switches on.
_UNSERVED = {
    "index_topk": _BY_INDEX,  # DeepSeek-V3.2, GLM-5
    "index_topk_blocks": _BY_INDEX,  # MiniMax-M3
    "indexer_budget": _BY_INDEX,  # Qwen4
    "attention_chunk_size": "a query sees the keys of its own chunk only",  # Llama 4
    "attn_temperature_tuning": "queries grow with a position that the layer counts by itself",
}


def text_values(config: Any) -> dict[str, Any]:
    """Return the config of the text decoder as a dict, with the general names of its fields.

    A class may have names of its own, for example `qk_rope_head_dim` for `head_dim`.
    """
    text: Any = config.get_text_config()
    values: dict[str, Any] = text.to_dict()
    aliases: Mapping[str, str] = getattr(text, "attribute_map", {})
    for general, own in aliases.items():
        if values.get(general) is None and own in values:
            values[general] = values[own]
    return values


def has_no_rotation(config: Any) -> bool:
    """Return whether a config says that its model has no rotary positions, as a load finds them.

    Every class of transformers whose model has a rotary module has `rope_parameters`.
    """
    text: Any = config.get_text_config()
    if not type(text).__module__.startswith("transformers.models."):
        return False
    kind = getattr(text, "position_embedding_type", "rope")
    return not hasattr(text, "rope_parameters") or kind != "rope"


def served_values(name: str, config: Any) -> dict[str, Any]:
    """Return `text_values` of a model that can be served as far as its config tells.

    `name`: that of its class. Raises ModelError, in the words of a load.
    """
    if has_no_rotation(config):
        from transformers.models.auto.modeling_auto import (  # noqa: PLC0415  # seconds
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )

        kind = config.model_type
        raise ModelError(f"{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)} {NO_ROTATION}")
    values = text_values(config)
    problem = impossible(values)
    if problem is not None:
        raise ModelError(f"{name}: {problem[0]} {problem[1]}")
    refuse_unserved_attention(name, values)
    return values


def state_shapes(values: Mapping[str, Any]) -> dict[int, StateShape]:
    """Return the states of the config's layers by index; empty for a model without them.

    Taking over the loaded model finds the same shapes for the architectures in docs/models.md.
    """
    kinds = {}
    if type(values.get("conv_L_cache")) is int:
        kinds["conv"] = StateShape(values["conv_L_cache"] - 1, values["hidden_size"])
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes: list[Any] = [values.get(f"linear_{name}") for name in (*names, "conv_kernel_dim")]
    # OLMo Hybrid has these fields, too, and a convolution each of queries, keys and values.
    is_olmo = "linear_allow_neg_eigval" in values
    if all(type(each) is int for each in sizes) and not is_olmo:
        num_key_heads, num_heads, key_dim, dim, num_taps = sizes
        num_channels = 2 * num_key_heads * key_dim + num_heads * dim
        kinds["linear_attention"] = StateShape(num_taps - 1, num_channels, num_heads, key_dim, dim)
    types = values.get("layer_types")
    if not kinds or not isinstance(types, list | tuple):
        return {}
    types = types[: values.get("num_hidden_layers")]
    return {
        index: kinds[each]
        for index, each in enumerate(types)
        if isinstance(each, str) and each in kinds
    }


def refuse_states_elsewhere(name: str, values: Mapping[str, Any], device: Any) -> None:
    """Raise ModelError for a model with states on a device without kernels for them."""
    if device.type != "cpu" and not has_gpu_kernels(device) and state_shapes(values):
        raise ModelError(
            f"{name} has layers that keep a state of each sequence, which are served on a CPU, or "
            f"on a CUDA device if triton is installed, got device {device}"
        )


def refuse_unserved_attention(name: str, values: Mapping[str, Any]) -> None:
    """Raise ModelError for attention that the self-check is too short to see."""
    for field, meaning in _UNSERVED.items():
        if values.get(field):
            raise ModelError(
                f"{name}: {field}: is {values[field]!r}, so {meaning}, which is not served yet"
            )


def check_values(path: Path) -> None:
    """Raise ModelError for a number of the config that no model can have, or an older word."""
    values = read_object(path) or {}
    parts = [each for name, each in values.items() if name.endswith("_config")]
    for each in (values, *(part for part in parts if isinstance(part, dict))):
        found = impossible(each)
        if found is not None:
            raise ModelError(f"{path}: {found[0]} {found[1]}")
        block = each.get("rope_scaling") or each.get("rope_parameters")
        if isinstance(block, dict) and block.get("rope_type", block.get("type")) == "su":
            # transformers knows that, and ends in a KeyError because it reads the length before.
            raise ModelError(f"{path}: rope_scaling: type 'su' is 'longrope' today: write that")


def torch_dtype(name: str, config: Any, device: "torch.device") -> "torch.dtype":
    """Return the dtype; `auto`: float32 on a CPU, the checkpoint's own dtype elsewhere."""
    import torch  # noqa: PLC0415  # a plan for a CPU needs no torch

    if name == "auto":
        own: torch.dtype = getattr(config, "dtype", None) or torch.float32
        return torch.float32 if device.type == "cpu" else own
    if name == "float16" and device.type == "cpu":
        raise ModelError(NO_FLOAT16)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
