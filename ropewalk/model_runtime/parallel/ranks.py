"""Tensor parallelism in the serving process: start the followers, and load the model with them."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import read_model_config
from ropewalk.model_runtime.parallel.division import ColumnDivision
from ropewalk.model_runtime.parallel.followers import Followers
from ropewalk.model_runtime.parallel.group import Group, RanksApartError
from ropewalk.model_runtime.parallel.mirrored_runner import MirroredRunner
from ropewalk.model_runtime.parallel.plan import Plan, check_devices, plan_of
from ropewalk.model_runtime.parallel.wire import Kind, json_bytes
from ropewalk.model_runtime.runner.model_runner import ModelRunner

_FAULT_S = 2.0  # until a follower that has ended is seen


class Ranks:
    """All ranks of one model, as rank 0 sees them."""

    def __init__(self, size: int) -> None:
        """Plan for `size` processes; none is started yet."""
        self.size = size
        self.followers: Followers | None = None
        self._group: Group | None = None
        self._division: ColumnDivision | None = None
        self._store: IO[bytes] | None = None

    def load(
        self,
        load: Callable[..., Checkpoint],
        source: str | Path,
        *,
        dtype: str,
        device: str,
        trust_remote_code: bool,
    ) -> Checkpoint:
        """Load a model with all ranks; `load` gets its `division`. Raises ModelError.

        The processes are started at the first call. A model that cannot be divided is refused
        before that. The threads of torch are shared out, if the device is a CPU.
        """
        options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        outline = read_model_config(source, device=device, **options)  # type: ignore[arg-type]
        check_devices(self.size, device, outline.device)
        plan = plan_of(outline, self.size)
        if self.followers is None:
            self._start(outline.device)
        assert self.followers is not None
        assert self._group is not None
        self._division = ColumnDivision(plan, self._group)
        for rank, send in enumerate(self.followers.senders(), start=1):
            where = {"source": str(source), "device": device_of(outline.device, rank)}
            send(Kind.LOAD, json_bytes({**options, **where}))
        try:
            return load(division=self._division)
        except Exception as error:
            # Else it is an error of rank 0, which followers may have met as well.
            fault = self.followers.wait_for_fault(_FAULT_S) if _is_of_others(error) else None
            self.close()  # they may wait in a gather that this rank has left
            if fault is None:
                raise
            raise ModelError(f"tensor_parallel_size {self.size}: {fault}") from error

    @property
    def plan(self) -> Plan:
        assert self._division is not None
        return self._division.plan

    @property
    def has_same_bits(self) -> bool:
        """Return whether the loaded model computes the bits of one rank."""
        return self._division is not None and self._division.has_same_bits

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Call `on_loss` with a sentence when a follower ends."""
        assert self.followers is not None
        self.followers.on_loss(on_loss)

    def runner(self, *parts: Any) -> ModelRunner:
        """Build a runner, as `ModelRunner` does, and the same on every rank."""
        assert self.followers is not None
        assert self._group is not None
        return MirroredRunner(self.followers, self._group, *parts)

    def close(self) -> None:
        """End the followers; another load starts others."""
        if self.followers is not None:
            self.followers.close()
        if self._group is not None:
            self._group.close()
        if self._store is not None:
            self._store.close()
        self.followers = self._group = self._store = None

    def _start(self, device: torch.device) -> None:
        num_threads = torch.get_num_threads()
        self._store, path = _meeting_file()
        try:
            self.followers = Followers(self.size, self._store.fileno())
        except OSError as error:
            raise ModelError(f"tensor_parallel_size {self.size}: {error}") from error
        for rank, send in enumerate(self.followers.senders(), start=1):
            joined = {"rank": rank, "size": self.size, "store": path}
            where = {"device": device_of(device, rank), "num_threads": num_threads}
            send(Kind.JOIN, json_bytes({**joined, **where}))
        own = torch.device(device_of(device, 0))
        self._group = Group(0, self.size, path, own)


def _meeting_file() -> tuple[IO[bytes], str]:
    """Return an empty file, and its path in each process that inherits the descriptor.

    On Linux the file is in no folder. The system removes it with the last rank, whatever ends that.
    """
    if sys.platform == "linux":
        file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
        return file, f"/proc/self/fd/{file.fileno()}"
    named = tempfile.NamedTemporaryFile(prefix="ropewalk-")  # noqa: SIM115  # removed when closed
    return named, named.name


def _is_of_others(error: BaseException | None) -> bool:
    """Return whether an error comes from a gather that another rank has left."""
    while error is not None and not isinstance(error, RanksApartError):
        error = error.__cause__
    return error is not None


def device_of(device: torch.device, rank: int) -> str:
    """Return the device of a rank: one GPU each, or the CPU of all."""
    return f"cuda:{rank}" if device.type == "cuda" else device.type
