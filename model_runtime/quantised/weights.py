"""Read the weights of a quantised checkpoint, one at a time, in the served number type."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from model_runtime.quantised.dequantise import dequantise
from model_runtime.quantised.inventory import Inventory


def read_weights(
    paths: Sequence[Path], inventory: Inventory, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a checkpoint that was not quantised. Raises ModelError.

    Dequantised weights have the number type `dtype`. Other tensors stay as they are in the files.
    """
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in paths}
        for weight in inventory.quantised:
            parts = {
                role: files[part.path].get_tensor(part.name) for role, part in weight.parts.items()
            }
            yield weight.name, dequantise(weight, parts, dtype)
        for tensor in inventory.plain:
            yield tensor.name, files[tensor.path].get_tensor(tensor.name)
