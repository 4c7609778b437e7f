"""The numbers of a GPU that the work of its kernels is cut by."""

from dataclasses import dataclass
from functools import cache

import torch

_RESERVED_BYTES = 1024  # of shared memory, for each program that runs (CUDA C++ guide, 8.0 and on)


@dataclass(frozen=True, slots=True)
class Card:
    """The processors of a GPU."""

    num_processors: int
    shared_bytes: int  # of a processor, for all programs that run there

    def has_room(self, num_programs: int, shared_bytes: int) -> bool:
        """Return whether so many programs with so much shared memory run on a processor."""
        return num_programs * (shared_bytes + _RESERVED_BYTES) <= self.shared_bytes


# What Triton's interpreter plays: few processors of an H200, so that keys are cut.
_INTERPRETED = Card(8, 228 * 1024)


@cache
def card_of(device: torch.device) -> Card:
    """Return the numbers of a device; without a GPU, those of the one that tests play."""
    if device.type != "cuda":
        return _INTERPRETED
    found = torch.cuda.get_device_properties(device)
    return Card(found.multi_processor_count, found.shared_memory_per_multiprocessor)
