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
    """Return the number of weights."""
    infos = file.tensors.items()
    return sum(math.prod(info.shape) for name, info in infos if name not in ROPE_TENSORS)


def sampling_of(file: GgufFile) -> Mapping[str, float]:
    """Return the sampling parameters that the file recommends. Raises ModelError."""
    keys = {name: f"general.sampling.{key}" for key, name in _SAMPLING.items()}
    return {name: file.number(key) for name, key in keys.items() if key in file.metadata}
