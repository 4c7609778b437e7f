"""Copies of pages between a cache on a GPU and pinned host memory, beside the steps.

They run on a stream of their own, in order, behind all that the device was asked before. A page is
gathered from all layers into one piece of memory on the device, so that one transfer takes it.

Shapes: N = pages, B = bytes of a page in one tensor, P = bytes of a page.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.model_runtime.engine.kv_disk.buffers import Bytes, Done


class CopyStream(Protocol):
    """A queue of copies that the device runs beside its steps."""

    def run(self, copy: Callable[[], None]) -> Done:
        """Queue a copy, behind the steps and copies that were queued before."""

    def let_steps_wait(self, done: Done) -> None:
        """Let steps that are queued from now on wait for the end of a copy."""


class SideStream:
    """A stream of CUDA beside the one that the calling thread uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, copy: Callable[[], None]) -> Done:
        """Queue a copy, behind the steps and copies that were queued before."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            copy()
        done: torch.cuda.Event = self._side.record_event()
        return done

    def let_steps_wait(self, done: Done) -> None:
        """Let steps that are queued from now on wait for the end of a copy."""
        assert isinstance(done, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(done)


class DevicePages:
    """The pages of a cache on a device, whose copies a stream runs."""

    step_bytes = 32 << 20  # about a millisecond of a PCIe bus

    def __init__(self, tensors: Sequence[Tensor], stream: CopyStream) -> None:
        """Keep the tensors, uint8 [N, B] each, in the order of a page's bytes."""
        self._tensors = tensors
        self._stream = stream
        sizes = [each.shape[1] for each in tensors]
        self.num_bytes = sum(sizes)
        device = tensors[0].device
        # Copies run in order, so the next page may use the memory of the one before.
        self._leaving_P, self._arriving_P = (
            torch.empty(self.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._arriving_B = torch.split(self._arriving_P, sizes)
        self._is_pinned = device.type == "cuda"

    def new_buffer(self, num_bytes: int) -> Bytes:
        """Return memory that the device can copy to and from while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned).numpy()

    def copy_out(self, page: int, into: Bytes) -> Done:
        """Queue the copy of a page from the cache."""

        def copy() -> None:
            torch.cat([each[page] for each in self._tensors], out=self._leaving_P)
            torch.from_numpy(into).copy_(self._leaving_P, non_blocking=True)

        return self._stream.run(copy)

    def copy_in(self, page: int, source: Bytes) -> Done:
        """Queue the copy of a page to the cache."""

        def copy() -> None:
            self._arriving_P.copy_(torch.from_numpy(source), non_blocking=True)
            for each, part in zip(self._tensors, self._arriving_B, strict=True):
                each[page].copy_(part)

        return self._stream.run(copy)

    def let_steps_wait(self, done: Done) -> None:
        self._stream.let_steps_wait(done)
