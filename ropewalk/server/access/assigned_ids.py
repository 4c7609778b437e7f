"""The identity that a trusted router gives an answer: id, time and seed.

A router that sends a request again to another server gives both runs the same identity, so their
bytes are the same. The engine knows a run by another id, because the first run may not have ended
when the second one comes to the same server. Ids that a client chooses could be those of other
answers, so a request without the router's key may not name any.
"""

import hashlib
import re
import secrets
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

ANSWER_HEADER, KEY_HEADER = "x-ropewalk-answer", "x-ropewalk-router-key"
_FORM = re.compile(r"([0-9a-f]{32}) ([0-9]{1,11}) ([0-9]{1,19})")
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class AssignedIds:
    """The identity of all answers to one request."""

    number: str  # 32 hexadecimal digits, the id without its prefix
    created: int  # seconds since 1970
    seed: int  # the answers have seeds that follow from it

    @classmethod
    def of(cls, header: str) -> "AssignedIds | None":
        """Return the identity that a header tells, or None if the header is malformed."""
        found = _FORM.fullmatch(header)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))

    def header(self) -> str:
        return f"{self.number} {self.created} {self.seed}"


def new_ids(now_s: float) -> AssignedIds:
    return AssignedIds(uuid.uuid4().hex, int(now_s), secrets.randbits(_SEED_BITS))


_told: ContextVar[AssignedIds | None] = ContextVar("assigned_ids", default=None)


def assigned_ids() -> AssignedIds | None:
    """Return the identity that a router gave the request of this task; None: it chose none."""
    return _told.get()


def assign_ids(told: AssignedIds | None) -> None:
    """Give the request of this task, and of those that it starts, an identity, or none."""
    _told.set(told)


class Seeds:
    """The seeds of the answers to one request whose body names none, one after the other."""

    def __init__(self) -> None:
        """Let them follow from the seed that a router has told; else they are random."""
        self._told = _told.get()
        self._num_given = 0

    def next(self) -> int:
        """Return the seed of the next answer."""
        if self._told is None:
            return secrets.randbits(_SEED_BITS)
        self._num_given += 1
        derived = hashlib.sha256(f"{self._told.seed} {self._num_given}".encode()).digest()
        return int.from_bytes(derived[:8]) >> (64 - _SEED_BITS)
