"""The fingerprint of a server, by which a router tells servers that give the same bytes.

It has two parts. Servers with another `model` part serve something else: other weights, number
types, settings, or a version whose sources differ. Servers with another `arithmetic` part serve the
same on another processor or with other libraries, so the last bits may differ.

It is made at the end of the load, and only with a `router_key`.
"""

import hashlib
from dataclasses import dataclass

_SHOWN = 32  # hexadecimal digits


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two hashes, as hexadecimal digits."""

    model: str  # of all served names
    arithmetic: str

    def of_name(self, deployment: object) -> str:
        """Return the part `model` of one served name, whose `repr` tells how it is scaled."""
        return hashlib.sha256(f"{self.model} {deployment!r}".encode()).hexdigest()[:_SHOWN]
