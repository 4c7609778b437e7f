"""The values of a model's config that describe its text decoder, and those that refuse it.

The self-check's prompts have 48 tokens. Attention that changes later, after thousands of tokens,
looks right to it. So such attention is recognised by the fields of the config.
"""

from collections.abc import Mapping
from typing import Any

from model_runtime.errors import ModelError

_BY_INDEX = "an index chooses the keys that a query sees"
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


def refuse_unserved_attention(name: str, values: Mapping[str, Any]) -> None:
    """Raise ModelError for attention that the self-check is too short to see."""
    for field, meaning in _UNSERVED.items():
        if values.get(field):
            raise ModelError(
                f"{name}: {field}: is {values[field]!r}, so {meaning}, which is not served yet"
            )
