"""The sizes of a file's weights, and the sampling that it recommends."""

import math
from collections.abc import Mapping

from model_runtime.gguf.file import GgufFile
from model_runtime.gguf.rope_block import ROPE_TENSORS

# The file's names of sampling parameters -> ours.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def num_parameters(file: GgufFile) -> int:
    infos = file.tensors.items()
    return sum(math.prod(info.shape) for name, info in infos if name not in ROPE_TENSORS)


def storage_of(file: GgufFile) -> tuple[int, str]:
    """Return the size of a file in bytes, and the number types of its tensors by their values."""
    values: dict[str, int] = {}
    for info in file.tensors.values():
        values[info.type_name] = values.get(info.type_name, 0) + math.prod(info.shape)
    names = sorted(values, key=lambda name: (-values[name], name))
    return file.num_bytes, ", ".join(names)


def sampling_of(file: GgufFile) -> Mapping[str, float]:
    """Return the sampling parameters that the file recommends. Raises ModelError."""
    found: dict[str, float] = {}
    for key, name in _SAMPLING.items():
        full = f"general.sampling.{key}"
        if full in file.metadata:
            is_count = name == "top_k"
            found[name] = file.integer(full, minimum=0) if is_count else file.number(full)
    return found
