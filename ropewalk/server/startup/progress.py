"""The progress of a start: the phase, its seconds, and the bytes or kernels so far.

One thread loads and writes, another one answers and reads. This module imports nothing heavy.
"""

import time
from collections.abc import Callable
from typing import Any

from ropewalk.server.wording import counted

_SECONDS_BETWEEN_LINES = 2.0
_COMPILING = "compiling kernels"
_KERNELS = "ropewalk.model_runtime.cpu_kernels."


class LoadingProgress:
    """The progress of one load."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` gets a line now and then while kernels are compiled."""
        self._say = say
        self._began = time.monotonic()
        self._phase = "importing"
        self._phase_began = self._began
        self._kernels: tuple[str, ...] = ()  # being compiled, each one for the one before it
        self._num_compiled = 0
        self._compiled_s = 0.0  # until the compiler rested last
        self._compiling_since: float | None = None  # None: it rests
        self._bytes: tuple[int, int] | None = None  # downloaded, and in total
        self._said = 0.0
        self._num_kept: Callable[[], int] = lambda: 0

    def enter(self, phase: str) -> None:
        """Begin a phase, in words that an operator understands."""
        self._phase, self._phase_began, self._bytes = phase, time.monotonic(), None

    def finish(self) -> None:
        """Tell how many kernels later starts find, if kernels were compiled."""
        # Only now, because the disk may refuse the last kernel.
        if self._said and (num_kept := self._num_kept()):
            self._say(f"compiled {counted(num_kept, 'kernel')}; later starts reuse them")

    def downloaded(self, done: int, total: int) -> None:
        self._bytes = (done, total)

    def compiling(self, kernel: str) -> None:
        """Note that the compiler has begun a kernel."""
        kernel = kernel.lstrip("_")
        now = time.monotonic()
        if not self._kernels:
            self._compiling_since = now
        self._kernels = (*self._kernels, kernel)
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        if not self._said:
            self._say("compiling kernels for this processor")
        self._said = now
        seconds = self._compiling_seconds()
        self._say(f"compiling {kernel}; {self._num_compiled} done, {seconds:.0f} s so far")

    def compiled(self) -> None:
        """Note that the compiler has finished the kernel that it began last."""
        self._kernels = self._kernels[:-1]
        self._num_compiled += 1
        if not self._kernels:
            self._compiled_s, self._compiling_since = self._compiling_seconds(), None

    def watch_compiler(self) -> None:
        """Follow numba's compiler; a kernel that is read from its cache is not compiled."""
        # The port answers before these imports.
        from numba.core import event  # noqa: PLC0415

        from ropewalk.model_runtime.cpu_kernels.jit import num_kept  # noqa: PLC0415

        def is_kernel(data: dict[str, Any]) -> bool:  # numba compiles functions of its own, too
            return str(data["dispatcher"].py_func.__module__).startswith(_KERNELS)

        progress = self
        self.know_kept(num_kept)

        class Watching(event.Listener):  # type: ignore[misc]  # numba has no types
            def on_start(self, event: event.Event) -> None:
                if is_kernel(event.data):
                    progress.compiling(event.data["dispatcher"].py_func.__name__)

            def on_end(self, event: event.Event) -> None:
                if is_kernel(event.data):
                    progress.compiled()

        event.register("numba:compile", Watching())

    def know_kept(self, num_kept: Callable[[], int]) -> None:
        self._num_kept = num_kept

    def as_json(self) -> dict[str, object]:
        """Return the fields of a 503 answer."""
        kernels = self._kernels
        now = time.monotonic()
        in_phase = self._compiling_seconds() if kernels else now - self._phase_began
        found: dict[str, object] = {
            "phase": _COMPILING if kernels else self._phase,
            "seconds": round(now - self._began, 1),
            "phase_seconds": round(in_phase, 1),
        }
        if (progress := self._bytes) is not None:
            found["bytes_done"], found["bytes_total"] = progress
        if kernels or self._num_compiled:
            found["kernels_compiled"] = self._num_compiled
        if kernels:
            found["kernel"] = kernels[0]
        return found

    def _compiling_seconds(self) -> float:
        """Return the seconds in which the compiler has worked."""
        since = self._compiling_since
        return self._compiled_s + (0.0 if since is None else time.monotonic() - since)
