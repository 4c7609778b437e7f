"""The format of the log, the same for every command: a line of keys and values on standard error.

This module does not import torch, nor the libraries whose own lines it brings into the format.
"""

import logging
import sys
from typing import Any

import structlog

_LIBRARIES = ("uvicorn", "transformers")


def log_to_stderr() -> None:
    """Configure the log of this process, with the lines of the libraries that log by themselves.

    A command may replace the stream (structlog's `logger_factory`) and keeps the format.
    """
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    for name in _LIBRARIES:
        _route(name)


class _ToOurLog(logging.Handler):
    """A handler that writes a library's record as a line of our log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            facts: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
            if record.exc_info is not None:
                facts["exc_info"] = record.exc_info
            structlog.get_logger(record.name).log(record.levelno, "library_message", **facts)
        except Exception:  # noqa: BLE001  # as every handler of logging does
            self.handleError(record)


class _RoutedLogger(logging.Logger):
    """A logger whose library cannot add a handler of its own, as transformers does at import."""

    def addHandler(self, hdlr: logging.Handler) -> None:
        """Add our handler and no other."""
        if isinstance(hdlr, _ToOurLog):
            super().addHandler(hdlr)


def _route(name: str) -> None:
    """Make our handler the only one of a library, imported or not."""
    before = logging.getLoggerClass()
    logging.setLoggerClass(_RoutedLogger)
    try:
        logger = logging.getLogger(name)
    finally:
        logging.setLoggerClass(before)
    logger.handlers.clear()
    logger.addHandler(_ToOurLog())
    logger.propagate = False
