"""The format of the log, the same for every command: a line of keys and values on standard error.

This module does not import torch.
"""

import logging
import sys

import structlog


def log_to_stderr() -> None:
    """Configure the log of this process.

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
