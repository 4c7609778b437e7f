"""The numbers of a GPU that the work of its kernels is cut by."""

from dataclasses import dataclass
from functools import cache

import torch

# The least rate of a card. Drivers know no clock of some memories; LPDDR5X has more than this.
_LEAST_BYTES_S = 2e11
_RESERVED_BYTES = 1024  # of shared memory, for each program that runs (CUDA C++ guide, 8.0 and on)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. Rates are those of its data sheet; a copy has nine tenths of them or less."""

    num_processors: int
    shared_bytes: int  # of a processor, for all programs that run there
    bytes_s: float  # of memory

    def has_room(self, num_programs: int, shared_bytes: int) -> bool:
        """Return whether so many programs with so much shared memory run on a processor."""
        return num_programs * (shared_bytes + _RESERVED_BYTES) <= self.shared_bytes


# What Triton's interpreter plays: few processors, so that keys are cut, and an H200's memory.
_INTERPRETED = Card(8, 228 * 1024, 4.9e12)


@cache
def card_of(device: torch.device) -> Card:
    """Return the numbers of a device; without a GPU, those of the one that tests play."""
    if device.type != "cuda":
        return _INTERPRETED
    found = torch.cuda.get_device_properties(device)
    # Bits arrive at both edges of the clock, which is in kHz.
    bytes_s = 2 * found.memory_clock_rate * 1e3 * found.memory_bus_width / 8
    return Card(
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        max(bytes_s, _LEAST_BYTES_S),
    )
