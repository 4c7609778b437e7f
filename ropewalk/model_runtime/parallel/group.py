"""The group of processes that compute one model together, and the exchange of their tensors.

There is no sum across ranks, only gathers: a rank computes some outputs of a linear whole, so every
output has one order of additions on any number of ranks. A sum across ranks has another one, and in
gloo's ring it depends on an element's place in the batch.

Shapes: R = rows, W = numbers of a row on one rank, N = ranks.
"""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.model_runtime.errors import RopewalkError

# A rank waits this long for the others. Ends of processes are seen by `followers.py`, at once.
_PATIENCE = timedelta(minutes=10)


class RanksApartError(RopewalkError):
    """The ranks no longer compute the same step, so each of them must end."""


class Group:
    """The ranks of one model; a process is in one group at a time."""

    def __init__(self, rank: int, size: int, store: str, device: torch.device) -> None:
        """Meet the other ranks over the file `store`. Raises RuntimeError if one is missing.

        The connections are on the loopback interface. On GPUs the exchange is NCCL's, elsewhere
        gloo's.
        """
        self.rank, self.size = rank, size
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, loopback)
        is_on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_on_gpu else "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
            # Connects now, because a capture of a CUDA graph must not be the first use.
            device_id=device if is_on_gpu else None,
        )
        # torch 2.13 has renamed it.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(self, x: Tensor, width: int) -> Tensor:
        """Return the ranks' parts of each row beside each other, [..., W] -> [..., width].

        The last parts may be padded: numbers beyond `width` are dropped.
        """
        rows_RW = x.reshape(-1, x.shape[-1]).contiguous()
        num_rows, part = rows_RW.shape
        gathered = x.new_empty(self.size * num_rows, part)
        if num_rows:
            try:
                self._gather(gathered, rows_RW)
            except RuntimeError as error:  # torch's, when another rank has ended
                raise RanksApartError(f"a gather across ranks failed: {error}") from error
        rows = gathered.view(self.size, num_rows, part).transpose(0, 1)
        rows = rows.reshape(num_rows, self.size * part)[:, :width]
        return rows.reshape(*x.shape[:-1], width)

    def told(self, number: int, device: torch.device) -> list[int]:
        """Return a number of each rank, in the order of ranks."""
        own = torch.tensor([[number]], dtype=torch.int64, device=device)
        told: list[int] = self.gather(own, self.size)[0].tolist()
        return told

    def share_from_first(self, x: Tensor) -> None:
        """Send a tensor of rank 0 to the others, whose tensor is overwritten."""
        dist.broadcast(x, 0)

    def close(self) -> None:
        """Leave the group. Other ranks may have ended, so NCCL does not wait for them."""
        if dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # it has no public name
        else:
            dist.destroy_process_group()
