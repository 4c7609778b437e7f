"""The progress of a load of weights: transformers' bar on a terminal, else lines of the log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from transformers.utils import logging as transformers_logging

_INTERVAL_S = 5.0  # between two lines

_log = structlog.get_logger(__name__)


@contextmanager
def logged_progress() -> Iterator[None]:
    """Replace the bars of transformers by log lines, unless standard error is a terminal.

    A bar redraws itself with carriage returns, which makes one long line of a log.
    """
    if sys.stderr.isatty():
        yield
        return
    before = transformers_logging.set_tqdm_hook(_logged)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _logged(_: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return LoggedProgress(*arguments, **named)


class LoggedProgress(transformers_logging.EmptyTqdm):  # type: ignore[misc]
    """Progress in the place of a tqdm: a line every few seconds, and one at the end."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Count `total`, or the length of what is iterated over; `desc` says what is counted."""
        super().__init__(*arguments, **named)
        self._what = str(named.get("desc") or "Loading")
        counted: Any = arguments[0] if arguments else ()
        self._total = named.get("total") or (len(counted) if hasattr(counted, "__len__") else None)
        self._num_done = 0
        self._told_s = time.monotonic()
        self._is_closed = False

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            yield each
            self.update()
        self.close()

    def update(self, num: int = 1) -> None:
        """Count `num` more, and log a line if the last one is old."""
        self._num_done += num
        if time.monotonic() - self._told_s >= _INTERVAL_S:
            self._told_s = time.monotonic()
            self._tell()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tell(self) -> None:
        _log.info("load_progress", what=self._what, done=self._num_done, total=self._total)
