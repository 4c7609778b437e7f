"""The fingerprint of a server, by which a router tells servers that give the same bytes.

It has two parts. Servers with another `model` part serve something else: other weights, number
types, settings, or a version whose sources differ. Servers with another `arithmetic` part serve the
same on another processor or with other libraries, so the last bits may differ.

A hash of the weights reads all of their files. It is made once, and only when a router asks.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

_SHOWN = 32  # hexadecimal digits

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two hashes, as hexadecimal digits."""

    model: str  # of all served names
    arithmetic: str

    def of_name(self, deployment: object) -> str:
        """Return the part `model` of one served name, whose `repr` tells how it is scaled."""
        return hashlib.sha256(f"{self.model} {deployment!r}".encode()).hexdigest()[:_SHOWN]


class AskedFingerprint:
    """A fingerprint that is made in a thread when it is first asked for. One event loop owns it."""

    def __init__(self, make: Callable[[], Fingerprint]) -> None:
        """Take the function that makes it, which may read for minutes and raise OSError."""
        self._make = make
        self._made: asyncio.Future[Fingerprint | None] | None = None

    @property
    def known(self) -> Fingerprint | None:
        """Return the fingerprint if it has been made."""
        made = self._made
        return made.result() if made is not None and made.done() else None

    async def made(self) -> Fingerprint | None:
        """Return the fingerprint; None if the files of the weights have changed or are gone."""
        if self._made is None:
            loop = asyncio.get_running_loop()
            self._made = loop.create_future()
            # Not of the loop's pool, whose threads the end of the process waits for.
            threading.Thread(
                target=self._run, args=(loop, self._made), name="fingerprint", daemon=True
            ).start()
        return await asyncio.shield(self._made)

    def _run(
        self, loop: asyncio.AbstractEventLoop, made: "asyncio.Future[Fingerprint | None]"
    ) -> None:
        found = None
        try:
            found = self._make()
        except OSError as error:
            _log.warning("no_fingerprint", why=str(error))
        except Exception:  # noqa: BLE001  # who waits must hear of an end
            _log.exception("no_fingerprint")
        try:
            loop.call_soon_threadsafe(made.set_result, found)
        except RuntimeError:  # the loop is closed
            return
