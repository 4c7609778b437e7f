"""Select the files of a hub repository that a load reads; all others stay on the hub.

Repositories often hold the same weights several times: pickled (.bin, .pth), as GGUF, for ONNX, or
as `consolidated.safetensors`.
"""

from collections.abc import Callable, Collection

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.files.folder_files import (
    ADAPTER,
    INDEX,
    MERGE,
    SINGLE,
    is_of_model,
)
from ropewalk.model_runtime.loading.hub.wanted import Wanted

REQUIRED = ("config.json", "tokenizer.json")
# Names that transformers reads beside the weights.
_SMALL = frozenset(
    {*REQUIRED, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"}
    | {"added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"}
    | {"chat_template.jinja", "chat_template.json"}
)
_MORE_TEMPLATES = "additional_chat_templates/"
_UNSAFE = (".bin", ".pth", ".pt")
_OTHERS = (*_UNSAFE, ".gguf", ".onnx", ".h5", ".msgpack")


def needed_files(
    model_id: str,
    names: Collection[str],
    wanted: Wanted,
    shards_of_index: Callable[[], Collection[str]],
) -> list[str]:
    """Return the names to download, sorted.

    `shards_of_index` reads the names that the index of the weights lists. It is called only if
    the weights are wanted and are in several files.

    Raises ModelError if a file is missing without which the model cannot be loaded.
    """
    if _holds_gguf_only(names):
        raise ModelError(
            f"{model_id} has GGUF files and no safetensors: download one of them, and name its "
            "path as the model"
        )
    if ADAPTER in names and "config.json" not in names:
        raise ModelError(f"{model_id} has an adapter without its model: {MERGE}")
    for name in REQUIRED:
        if name not in names:
            raise ModelError(f"{model_id} has no {name} on the hub, so it cannot be served")
    found = {name for name in names if name in _SMALL or name.startswith(_MORE_TEMPLATES)}
    if wanted.code:
        found |= {name for name in names if name.endswith(".py")}
    if wanted.weights:
        found |= _weights(model_id, names, shards_of_index)
    return sorted(found)


def _holds_gguf_only(names: Collection[str]) -> bool:
    return any(name.endswith(".gguf") for name in names) and not any(
        name.endswith(".safetensors") for name in names
    )


def _weights(
    model_id: str, names: Collection[str], shards_of_index: Callable[[], Collection[str]]
) -> set[str]:
    """Return the files that transformers would load, as `weight_files` does for a folder."""
    if SINGLE in names:
        return {SINGLE}
    if INDEX in names:
        shards = set(shards_of_index())
        missing = sorted(shards - set(names))
        if missing:
            raise ModelError(f"{model_id} has no {missing[0]} on the hub, which its {INDEX} names")
        return {INDEX, *shards}
    found = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    found = set(filter(is_of_model, found))
    if not found:
        others = sorted(name for name in names if name.endswith(_OTHERS) and "/" not in name)
        beside = f" (only {', '.join(others[:3])})" if others else ""
        raise ModelError(
            f"{model_id} has no weights in safetensors on the hub{beside}: choose a repository "
            "or a revision that has them"
        )
    return found
