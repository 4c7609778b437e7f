"""A meter of the memory of tensors, for a machine without a GPU."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropewalk.model_runtime.engine.memory.memory_profile import Reading

GIB = 2**30


class TensorMeter(TorchDispatchMode):
    """Counts the bytes of tensors that torch's operations make, as an allocator would."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}
        self._allocated = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note each storage that was not there before."""
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and not each.is_meta:
                self._note(each.untyped_storage())
        self._peak = max(self._peak, self._allocated)
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._alive:
            self._allocated += num_bytes
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key, num_bytes))

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._alive[key]
        self._allocated -= num_bytes

    def reset(self) -> None:
        """Count from here on, as in `Meter`."""
        self._peak = self._allocated

    def read(self) -> Reading:
        """The bytes as in `Meter`, on a device without other users."""
        return Reading(
            10 * GIB, 10 * GIB - self._allocated, self._allocated, self._allocated, self._peak
        )
