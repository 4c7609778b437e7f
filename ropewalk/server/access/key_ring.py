"""The keys in force, and the allowance of each name."""

import secrets

from ropewalk.server.access.allowance import Allowance, KeyMetrics
from ropewalk.server.access.keys import NO_BOUNDS, KeyTable, digest_of


class KeyRing:
    """Finds the allowance of a presented key. Its table can be replaced while requests run."""

    def __init__(self, table: KeyTable, metrics: KeyMetrics) -> None:
        self._metrics = metrics
        self._allowances: dict[str, Allowance] = {}
        self._table = KeyTable()
        self.replace(table)

    @property
    def table(self) -> KeyTable:
        return self._table

    def replace(self, table: KeyTable) -> None:
        """Put other keys in force. A name that stays keeps what it has used."""
        for name in [name for name in self._allowances if name not in table.names]:
            # Its requests run to their end and keep their own reference.
            del self._allowances[name]
            self._metrics.forget(name)
        for name in table.names:
            bounds = table.bounds.get(name, NO_BOUNDS)
            if name in self._allowances:
                self._allowances[name].rebound(bounds)
            else:
                self._allowances[name] = Allowance(name, bounds, self._metrics.of(name))
        self._table = table

    def find(self, key: str) -> Allowance | None:
        """Return the allowance of a key, or None if the key is not known."""
        given = digest_of(key)
        # Every key is compared in full, so that the time taken reveals nothing about them.
        matches = [secrets.compare_digest(given, known.digest) for known in self._table.keys]
        if not any(matches):
            return None
        return self._allowances[self._table.keys[matches.index(True)].name]
