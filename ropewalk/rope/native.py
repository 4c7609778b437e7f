"""The rotation that a checkpoint was trained with, read from its config.

Only this file handles the config's many forms (v4 and v5, flat and per layer type).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.rope.errors import RopeConfigError
from ropewalk.rope.from_config import Method, parse_method, rope_type_of
from ropewalk.rope.methods import Frequencies, Rotary, Scaling, Unscaled

_FIELD = "dual_chunk_attention_config"
_NUMBERS = ("chunk_size", "local_size", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class TrainedDualChunk:
    """The block of a checkpoint's config, which transformers ignores."""

    chunk_size: int  # C
    local_size: int
    native_len: int  # L, the length of training
    longest: int  # max_position_embeddings, which the method reaches

    def rope_block(self) -> dict[str, Any]:
        """Return the rope block that serves the checkpoint as vLLM 0.8.5 did.

        Up to L every distance is the true one. Beyond, logits are multiplied by s squared.
        """
        positions = {
            "method": "dual_chunk",
            "chunk_size": self.chunk_size,
            "local_size": self.local_size,
            "temperature": "qwen",
        }
        return {"rope_type": "default", "positions": positions}


def trained_dual_chunk(config: Mapping[str, Any], max_len: int) -> TrainedDualChunk | None:
    """Read the block beside `max_position_embeddings`; None if there is none.

    Raises RopeConfigError.
    """
    block = config.get(_FIELD)
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise RopeConfigError(_FIELD, f"must be an object, got {block!r}")
    for field, value in block.items():
        if field not in _NUMBERS and value not in (None, False):
            raise RopeConfigError(f"{_FIELD}.{field}", f"is not supported; got {value!r}")
    numbers = [block.get(field) for field in _NUMBERS]
    for field, value in zip(_NUMBERS, numbers, strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RopeConfigError(f"{_FIELD}.{field}", f"must be an integer >= 1, got {value!r}")
    chunk_size, local_size, native_len = (int(value or 0) for value in numbers)
    for field, value, most, limit in (
        ("local_size", local_size, chunk_size - 1, "the chunk size less 1"),
        ("chunk_size", chunk_size, native_len, "the trained length"),
        (_NUMBERS[-1], native_len, max_len, "max_position_embeddings"),
    ):
        if value > most:
            raise RopeConfigError(f"{_FIELD}.{field}", f"must be <= {limit} ({most}), got {value}")
    return TrainedDualChunk(chunk_size, local_size, native_len, max_len)


# The key of the table if all layers of a model use the same one.
ALL_LAYERS = "all"
# If tables differ by layer type, a deployment scales these layers only.
_SCALED_LAYER_TYPE = "full_attention"
_PROPORTIONAL = "proportional"
# transformers writes the newer name of a type beside the older one.
_NEWER_NAMES = {"mrope": "default", "su": "longrope"}
# These fields of a checkpoint's block describe its model. The temperature by position is computed
# by the model itself (Ministral 3), from the positions that a step gives it.
_MODEL_FIELDS = ("max_position_embeddings", "llama_4_scaling_beta", "finetuned")
_ROTARY_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True)
class NativeTable:
    """One table of the checkpoint."""

    rotary: Rotary
    scaling: Scaling

    def frequencies(self, scaling: Scaling | None = None) -> Frequencies:
        """Return the native table, or the table of this rotary with another scaling."""
        return (scaling or self.scaling).frequencies(self.rotary)


@dataclass(frozen=True, slots=True)
class NativeRope:
    """The tables of a checkpoint by layer type, and the length they were trained for."""

    tables: Mapping[str, NativeTable]  # layer type -> table; ALL_LAYERS when there is one
    native_len: int  # L, tokens
    method: Method  # the checkpoint's own block on the layers a deployment scales
    partial_rotary_factor: float = 1.0  # rotated fraction of a head, on those layers
    chunked: TrainedDualChunk | None = None  # positions of training beyond L
    # The block as a deployment may state it; None: the checkpoint carries no scaling.
    block: Mapping[str, Any] | None = None
    added_block: str | None = None  # why nobody trained with the block; None: the model was

    @property
    def scaled_layer_type(self) -> str:
        """Return the layer type with the table that deployments and requests replace."""
        return ALL_LAYERS if ALL_LAYERS in self.tables else _SCALED_LAYER_TYPE

    @property
    def rotary(self) -> Rotary:
        return self.tables[self.scaled_layer_type].rotary

    @property
    def carries_scaling(self) -> bool:
        return not isinstance(self.method.scaling, Unscaled)

    @property
    def trained(self) -> "NativeRope":
        """Return the tables that the model was trained with, without a block that was added."""
        return self if self.added_block is None else self.without_scaling()

    def without_scaling(self) -> "NativeRope":
        """Return the tables of training before the block, for a block that scales by length."""
        scaled = replace(self.tables[self.scaled_layer_type], scaling=Unscaled())
        return replace(
            self,
            tables={**self.tables, self.scaled_layer_type: scaled},
            native_len=self.method.native_len,
            method=Method(Unscaled(), self.method.native_len, 1.0),
        )


def native_rope(config: Mapping[str, Any]) -> NativeRope:
    """Read a checkpoint's config (a dict, as in config.json). Raises RopeConfigError."""
    max_len = config.get("max_position_embeddings")
    if not isinstance(max_len, int) or max_len < 1:
        raise RopeConfigError(
            "max_position_embeddings", f"must be an integer >= 1, got {max_len!r}"
        )
    chunked = trained_dual_chunk(config, max_len)
    if chunked is not None:
        max_len = chunked.native_len
    blocks = _blocks_by_layer_type(config)
    if not {ALL_LAYERS, _SCALED_LAYER_TYPE} & set(blocks):
        raise RopeConfigError(
            "rope_parameters", f"has layer types {sorted(blocks)}, none is {_SCALED_LAYER_TYPE}"
        )
    methods = {name: _native_method(name, block, config, max_len) for name, block in blocks.items()}
    tables = {
        name: NativeTable(_rotary(name, blocks[name], config), method.scaling)
        for name, method in methods.items()
    }
    scaled = ALL_LAYERS if ALL_LAYERS in methods else _SCALED_LAYER_TYPE
    method, own = methods[scaled], blocks[scaled]
    original = _original_len(own, config) or 0
    if not original and scaled == ALL_LAYERS and method.scaling.rope_type == "linear":
        # As in vLLM. Where layer types have blocks of their own, the length is the extended one.
        original = max_len
    added = _why_added(own, method, max_len)
    native_len = max(max_len, round(method.factor * original))
    native = NativeRope(
        tables,
        native_len if added is None else method.native_len,
        method,
        _rotated_share(own, config),
        chunked,
        _stated_block(own, method),
        added,
    )
    if chunked is not None and native.carries_scaling:
        raise RopeConfigError(
            "dual_chunk_attention_config",
            f"is not supported beside a table that is scaled ({native.method.scaling.rope_type})",
        )
    return native


def _why_added(block: Mapping[str, Any], method: Method, max_len: int) -> str | None:
    """Return why a YaRN block was added after training; None if the model was trained with it.

    Model cards tell users to add one. It then reaches beyond `max_position_embeddings`, where a
    model that was trained with a block ends (DeepSeek, gpt-oss). The authors of YaRN leave
    `max_position_embeddings` as it was, and write `finetuned` into the block. In other methods the
    numbers tell nothing: Llama 3.2 was trained with a block that reaches twice as far.
    """
    if _scaling_type(block) != "yarn" or block.get("finetuned"):
        return None
    if method.factor * method.native_len <= max_len:
        return None
    return (
        f"factor {method.factor:g} x {method.native_len} is more than max_position_embeddings "
        f"({max_len})"
    )


def _stated_block(block: Mapping[str, Any], method: Method) -> dict[str, Any] | None:
    """Return a checkpoint's scaling as a deployment may state it; None if there is none."""
    if isinstance(method.scaling, Unscaled):
        return None
    of_model = (*_MODEL_FIELDS, *_ROTARY_FIELDS, "type")
    stated = {field: value for field, value in block.items() if field not in of_model}
    own = {"rope_type": _scaling_type(block), "factor": method.factor}
    return {**stated, **own, "original_max_position_embeddings": method.native_len}


def _original_len(block: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Return the length before scaling, if the checkpoint gives one."""
    name = _scaling_type(block)
    if name == "linear":
        return block.get("original_max_position_embeddings")
    if name not in ("yarn", "llama3", "longrope"):
        return None  # dynamic acts on max_position_embeddings
    # Phi-3 has it beside the block, and that value takes precedence (as in transformers).
    outside = config.get("original_max_position_embeddings")
    return outside or block.get("original_max_position_embeddings")


def _stated_type(block: Mapping[str, Any]) -> Any:
    """Return the type in the block, whatever it is. Raises RopeConfigError for two."""
    stated = [block[key] for key in ("rope_type", "type") if block.get(key) is not None]
    if not all(isinstance(each, str) for each in stated):
        return rope_type_of(block)
    names = set(stated)
    names -= {older for older, newer in _NEWER_NAMES.items() if newer in names}
    return names.pop() if len(names) == 1 else rope_type_of(block)


def _scaling_type(block: Mapping[str, Any]) -> str:
    """Return the type of the block's scaling; two types of checkpoints are no scaling.

    `mrope` numbers the parts of an image, and text has plain positions (transformers reads it as
    `default`). `proportional` says which pairs rotate (`_rotary`), and may have a factor as
    `linear` has it.
    """
    name = _stated_type(block)
    if name == "mrope":
        return "default"
    if name == "ntk":
        raise RopeConfigError(
            "rope_type", "'ntk' is for deployments: transformers reads no checkpoint with it"
        )
    if name == _PROPORTIONAL:
        return "default" if block.get("factor") is None else "linear"
    return rope_type_of({"rope_type": name})


def _native_method(
    layer_type: str, block: Mapping[str, Any], config: Mapping[str, Any], max_len: int
) -> Method:
    if layer_type != ALL_LAYERS and block.get("truncate") is not None:
        raise RopeConfigError(
            "truncate", "inside a per-layer-type block is ignored by transformers, so refused here"
        )
    original = _original_len(block, config)
    scaling = {**block, "original_max_position_embeddings": original, "type": None}
    scaling["rope_type"] = _scaling_type(block)
    for field in _MODEL_FIELDS:
        scaling.pop(field, None)
    _check_model_fields(block, max_len)
    return parse_method(scaling, _rotary(layer_type, block, config), max_len, served_len=max_len)


def _check_model_fields(block: Mapping[str, Any], max_len: int) -> None:
    """Check the fields of a checkpoint's block that describe its model."""
    repeated = block.get("max_position_embeddings")
    if repeated is not None and repeated != max_len:
        raise RopeConfigError(
            "max_position_embeddings", f"is {max_len} beside the block, and {repeated!r} in it"
        )
    finetuned = block.get("finetuned")
    if finetuned is not None and not isinstance(finetuned, bool):
        raise RopeConfigError("finetuned", f"must be true or false, got {finetuned!r}")
    beta = block.get("llama_4_scaling_beta")
    if beta is not None and (isinstance(beta, bool) or not isinstance(beta, int | float)):
        raise RopeConfigError("llama_4_scaling_beta", f"must be a number, got {beta!r}")


def _rotary(layer_type: str, block: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    theta = _first_number("rope_theta", 10_000.0, block, config)
    head_dim = _head_dim(layer_type, config)
    share = _rotated_share(block, config)
    if _stated_type(block) == _PROPORTIONAL:
        rotary_dim, num_turning = head_dim, int(share * head_dim // 2)
    elif share > 1:
        raise RopeConfigError("partial_rotary_factor", f"must be <= 1, got {share:g}")
    else:
        rotary_dim, num_turning = int(head_dim * share), None
    if rotary_dim < 4 or rotary_dim % 2:
        raise RopeConfigError(
            "head_dim", f"gives {rotary_dim} rotary dimensions; even, >= 4 needed"
        )
    if num_turning is not None and not 2 <= num_turning <= rotary_dim // 2:
        raise RopeConfigError(
            "partial_rotary_factor",
            f"is {share:g}, which rotates {num_turning} of {rotary_dim // 2} pairs; at least 2 and "
            "at most all needed",
        )
    return Rotary(rotary_dim, theta, num_turning)


def _head_dim(layer_type: str, config: Mapping[str, Any]) -> int:
    """Return the width of a head in the layers of a type; layers may state their own (Gemma 4)."""
    common = config.get("head_dim")
    common = common or config["hidden_size"] // config["num_attention_heads"]
    of_layers = {int(key): each for key, each in (config.get("per_layer_config") or {}).items()}
    types = config.get("layer_types") or []
    widths = {
        of_layers.get(index, {}).get("head_dim") or common
        for index in (range(len(types)) if types else of_layers)
        if layer_type == ALL_LAYERS or types[index] == layer_type
    } or {common}
    if len(widths) > 1:
        raise RopeConfigError(
            "per_layer_config", f"gives {layer_type} layers heads of {sorted(widths)} dimensions"
        )
    width: int = widths.pop()
    return width


def _rotated_share(block: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    return _first_number("partial_rotary_factor", 1.0, block, config)


def _first_number(field: str, default: float, *holders: Mapping[str, Any]) -> float:
    """Return the first stated value of a field, or the default. Raises RopeConfigError."""
    for holder in holders:
        value = holder.get(field)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise RopeConfigError(field, f"must be a finite number > 0, got {value!r}")
        return float(value)
    return default


def _blocks_by_layer_type(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the config's rope blocks; several only if layer types have blocks of their own."""
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(block, Mapping):
        raise RopeConfigError("rope_parameters", f"must be an object, got {block!r}")
    nested = {key: value for key, value in block.items() if isinstance(value, Mapping)}
    if not nested:
        return {ALL_LAYERS: block}
    loose = sorted(set(block) - set(nested))
    if [key for key in loose if block[key] is not None]:
        raise RopeConfigError(
            loose[0], "stands beside per-layer-type blocks, where nothing reads it"
        )
    return nested
