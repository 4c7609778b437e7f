"""The format of the log, the same for every command: one line an event on standard error.

This module does not import torch, nor the libraries whose own lines it brings into the format.
"""

import io
import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Literal

import structlog

LogFormat = Literal["console", "json", "logfmt"]
LogLevel = Literal["debug", "info", "warning", "error"]

# These keep their lines from the root. The lines of all other libraries reach it.
_LIBRARIES = ("uvicorn", "transformers", "huggingface_hub")
_STDERR = 2  # the highest number of a standard file
_ORDER = ["timestamp", "level", "event"]


def log_to_stderr(log_format: LogFormat = "logfmt", level: LogLevel = "info") -> None:
    """Configure the log of this process, with the lines of the libraries that log by themselves.

    Libraries tell their warnings and errors; at the level debug, those of `_LIBRARIES` tell more. A
    command may replace the stream (structlog's `logger_factory`) and keeps the format. Lines are
    lost from then on, with no error, while standard error cannot be written.
    """
    fill_standard_files()
    _keep_stderr()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *_renderers(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if level == "debug":
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "debug")  # it sets its level at its import
    logging.captureWarnings(True)  # noqa: FBT003  # its only argument
    root = logging.getLogger()
    if not any(isinstance(each, _ToOurLog) for each in root.handlers):
        root.addHandler(_ToOurLog())
    for name in _LIBRARIES:
        _route(name)


def fill_standard_files() -> None:
    """Open the null device as each standard file that was closed at the start.

    Else a socket gets its number, and a process that is started later writes its errors there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)  # noqa: FBT003  # its only positional form
    os.close(number)


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write, because its reader is gone or the disk is full."""

    def write(self, data: Any) -> int:
        """Write what is possible, and say that all of it is written."""
        num_bytes = memoryview(data).nbytes
        try:
            return super().write(data) or num_bytes
        except OSError:
            return num_bytes


def _keep_stderr() -> None:
    """Let no write to standard error raise: a line of the log must not end what it tells of."""
    if sys.stderr is None:  # it was closed at the start
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # for good
        return
    standard = sys.__stderr__
    if standard is not None and sys.stderr is standard:  # else a test or a tool reads it
        standard.flush()
        buffer = io.BufferedWriter(_LossyFile(standard.fileno(), "wb", closefd=False))
        sys.stderr = io.TextIOWrapper(
            buffer, standard.encoding, standard.errors, line_buffering=True
        )


def _renderers(log_format: LogFormat) -> list[structlog.typing.Processor]:
    """Return what makes a line of an event."""
    if log_format == "console":
        plain = structlog.dev.plain_traceback  # in full, as in the other formats
        is_terminal = sys.stderr.isatty()
        return [
            structlog.dev.ConsoleRenderer(
                colors=is_terminal, repr_native_str=True, exception_formatter=plain
            )
        ]
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [
        structlog.processors.format_exc_info,
        _escape_controls,
        structlog.processors.LogfmtRenderer(key_order=_ORDER, bool_as_flag=False),
    ]


def _escape_controls(
    _: object, __: str, facts: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Escape what could end a line or steer a terminal; line feeds are the renderer's own part."""
    for name, value in facts.items():
        if value is None or isinstance(value, int | float):
            continue
        text = str(value)
        if not text.isprintable():
            facts[name] = "".join(
                each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text
            )
    return facts


class _ToOurLog(logging.Handler):
    """A handler that writes a library's record as a line of our log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            facts: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
            if record.exc_info is not None:
                facts["exc_info"] = record.exc_info
            level = max(logging.DEBUG, min(logging.CRITICAL, record.levelno // 10 * 10))
            structlog.get_logger(record.name).log(level, "library_message", **facts)
        except Exception:  # noqa: BLE001  # as every handler of logging does
            self.handleError(record)


class _RoutedLogger(logging.Logger):
    """A logger whose lines reach the root alone, whatever its library sets at its import.

    transformers adds a handler, and sets `propagate` to False, or to True with CI in the
    environment.
    """

    @property
    def propagate(self) -> bool:
        """True: the root's handler is the one that writes."""
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        """Ignore the value."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Add no handler, because it would write a line twice."""


def _route(name: str) -> None:
    """Let the lines of a library, imported or not, reach the root alone."""
    before = logging.getLoggerClass()
    logging.setLoggerClass(_RoutedLogger)
    try:
        logger = logging.getLogger(name)
    finally:
        logging.setLoggerClass(before)
    logger.handlers.clear()
    logger.propagate = True
