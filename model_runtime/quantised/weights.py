"""The weights of a quantised checkpoint, each computed when it is asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from model_runtime.quantised.dequantise import dequantise
from model_runtime.quantised.inventory import Inventory, QuantisedWeight


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A weight that is computed when it is indexed by `...`, as transformers does with slices."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the weight; `index` is `...`."""
        return self.read()[index]


@contextmanager
def open_weights(
    paths: Sequence[Path], inventory: Inventory, dtype: torch.dtype
) -> Iterator[Mapping[str, Any]]:
    """Give what transformers takes for the tensors of a checkpoint that was not quantised.

    Dequantised weights have the number type `dtype`. Other tensors are slices of the files. All
    are computed when they are indexed, so experts that transformers joins are not held twice.
    """
    with ExitStack() as opened:
        files = {path: opened.enter_context(safe_open(path, framework="pt")) for path in paths}
        found: dict[str, Any] = {
            weight.name: LazyWeight(partial(_read, files, weight, dtype))
            for weight in inventory.quantised
        }
        found |= {each.name: files[each.path].get_slice(each.name) for each in inventory.plain}
        yield found


def _read(files: Mapping[Path, Any], weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    roles = weight.parts.items()
    parts = {role: files[part.path].get_tensor(part.name) for role, part in roles}
    return dequantise(weight, parts, dtype)
