"""The values of a model's config that no model can have: numbers, and names that are none.

They are checked before anything is made for each layer, head or token. The limits are far above
those of any published model, and far below what would fill a machine.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Field of a config -> its largest value. Lists, with a number for each layer, are left alone.
_MOST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "v_head_dim": 2**14,
    "vocab_size": 2**27,
    "max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
}
# transformers demands of these types that heads divide the width, whatever `head_dim` states.
_WHOLE_HEADS = frozenset({"arcee", "llama"})


def impossible(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a field with a value that no model can have, and the problem; None if all are good.

    `values` has the names of transformers' configs. Absent fields and those that are null pass.
    """
    return next(_problems(values), None)


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind, named = values.get("model_type"), values.get("architectures")
    if not isinstance(kind, str | None):
        yield "model_type", f"must be a text, got {kind!r}"
        return
    if named is not None and not (
        isinstance(named, list) and all(isinstance(each, str) for each in named)
    ):
        yield "architectures", f"must be a list of names, got {named!r}"
    numbers = {name: values[name] for name in _MOST if type(values.get(name)) is int}
    for name, value in numbers.items():
        least = 0 if _may_be_none(name, values) else 1
        if not least <= value <= _MOST[name]:
            yield name, f"must be from {least} to {_MOST[name]}, got {value}"
    num_heads, num_kv_heads = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    if num_heads and num_kv_heads and num_heads % num_kv_heads:
        yield (
            "num_key_value_heads",
            f"must divide num_attention_heads ({num_heads}), got {num_kv_heads}",
        )
    width = numbers.get("hidden_size")
    is_whole = kind in _WHOLE_HEADS
    if is_whole and num_heads and width and width % num_heads:
        yield "num_attention_heads", f"must divide hidden_size ({width}), got {num_heads}"


def _may_be_none(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether 0 is a word for none, because something else stands for the field."""
    if name == "intermediate_size":  # a layer may have no other gates than those of its experts
        return any("expert" in each for each in values)
    if name == "head_dim":  # latent attention has two widths of its own
        return bool(values.get("kv_lora_rank"))
    return name == "sliding_window"
