"""The rotation that a checkpoint was trained with, read from its config.

Only this file handles the config's many forms (v4 and v5, flat and per layer type).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope.errors import RopeConfigError
from rope.frequencies import Frequencies, Rotary, Scaling, Unscaled
from rope.from_config import Method, parse_method, rope_type_of

# The key of the table if all layers of a model use the same one.
ALL_LAYERS = "all"
# If tables differ by layer type, a deployment scales these layers only (design, section 2).
_SCALED_LAYER_TYPE = "full_attention"


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

    @property
    def scaled_layer_type(self) -> str:
        """Return the layer type with the table that deployments and requests replace."""
        return ALL_LAYERS if ALL_LAYERS in self.tables else _SCALED_LAYER_TYPE

    @property
    def rotary(self) -> Rotary:
        """Return the rotary part of a head on the layers that deployments scale."""
        return self.tables[self.scaled_layer_type].rotary

    @property
    def carries_scaling(self) -> bool:
        """Return whether the checkpoint was trained with a scaled table."""
        return not isinstance(self.method.scaling, Unscaled)


def native_rope(config: Mapping[str, Any]) -> NativeRope:
    """Read a checkpoint's config (a dict, as in config.json). Raises RopeConfigError."""
    max_len = config.get("max_position_embeddings")
    if not isinstance(max_len, int) or max_len < 1:
        raise RopeConfigError(
            "max_position_embeddings", f"must be an integer >= 1, got {max_len!r}"
        )
    _refuse_dual_chunk(config, max_len)
    blocks = _blocks_by_layer_type(config)
    if len(blocks) > 1 and _SCALED_LAYER_TYPE not in blocks:
        raise RopeConfigError(
            "rope_parameters", f"has layer types {sorted(blocks)}, none is {_SCALED_LAYER_TYPE}"
        )
    methods = {
        name: _native_method(block, config, max_len, nested=len(blocks) > 1)
        for name, block in blocks.items()
    }
    tables = {
        name: NativeTable(_rotary(blocks[name], config), method.scaling)
        for name, method in methods.items()
    }
    scaled = ALL_LAYERS if ALL_LAYERS in methods else _SCALED_LAYER_TYPE
    original = _original_len(blocks[scaled], config) or 0
    native_len = max(max_len, round(methods[scaled].factor * original))
    share = _rotated_share(blocks[scaled], config)
    return NativeRope(tables, native_len, methods[scaled], share)


def _refuse_dual_chunk(config: Mapping[str, Any], max_len: int) -> None:
    """Refuse a config with Dual Chunk Attention (arXiv 2402.17463), as Qwen2.5-7B-Instruct-1M has.

    Such a checkpoint was trained for the block's original_max_position_embeddings. It reaches
    max_position_embeddings by positions that repeat in chunks, which plain rotation does not do.
    """
    block = config.get("dual_chunk_attention_config")
    if block is None:
        return
    trained = block.get("original_max_position_embeddings") if isinstance(block, Mapping) else None
    trained_for = f"the checkpoint was trained for {trained} tokens and " if trained else "it "
    raise RopeConfigError(
        "dual_chunk_attention_config",
        f"is Dual Chunk Attention, which is not served yet; {trained_for}reaches its "
        f"max_position_embeddings ({max_len}) only with that method",
    )


def _original_len(block: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Return the length before scaling, if the checkpoint gives one."""
    if rope_type_of(block) not in ("yarn", "llama3", "longrope"):
        return None  # the others act on max_position_embeddings
    # Phi-3 has it beside the block, and that value takes precedence (as in transformers).
    outside = config.get("original_max_position_embeddings")
    return outside or block.get("original_max_position_embeddings")


def _native_method(
    block: Mapping[str, Any], config: Mapping[str, Any], max_len: int, *, nested: bool
) -> Method:
    if nested and block.get("truncate") is not None:
        raise RopeConfigError(
            "truncate", "inside a per-layer-type block is ignored by transformers, so refused here"
        )
    # If a method acts on max_position_embeddings, transformers does not read the other length.
    original = _original_len(block, config)
    block = {**block, "original_max_position_embeddings": original}
    return parse_method(block, _rotary(block, config), max_len, served_len=max_len)


def _rotary(block: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    theta = block.get("rope_theta") or config.get("rope_theta") or 10_000.0
    head_dim = config.get("head_dim")
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = int(head_dim * _rotated_share(block, config))
    if rotary_dim < 4 or rotary_dim % 2:
        raise RopeConfigError(
            "head_dim", f"gives {rotary_dim} rotary dimensions; even, >= 4 needed"
        )
    return Rotary(rotary_dim, float(theta))


def _rotated_share(block: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    return block.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0


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
