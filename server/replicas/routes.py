"""The routing state of an API process: its replicas, their load and the requests on their way.

Ray makes the router (`router.py`) by itself, in the process of each handle, so the two meet here.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ropewalk.server.replicas.choice import ReplicaChoice
from ropewalk.server.replicas.prompt_pages import PromptPages


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as the router knows it."""

    pages: PromptPages
    avoid: frozenset[str]  # replicas that have lost it
    on_try: Callable[[], None] = lambda: None  # called when a replica is about to be tried


class Routes:
    """The choice of a replica for each request. One event loop owns it."""

    def __init__(self, silence_lasts_s: float = 30.0) -> None:
        """Take how long a replica that fell silent is tried last, unless it is heard before."""
        self.choice = ReplicaChoice()
        self._silence_lasts_s = silence_lasts_s
        self.on_update: Callable[[], None] = lambda: None  # called when the replicas changed
        self._has_changed = asyncio.Event()
        self._asked: dict[str, Asked] = {}
        self._replica_of: dict[str, str] = {}
        self._num_predicted: dict[str, int] = {}
        # Replicas that did not answer, each with the time.monotonic() until which it is tried last.
        # Without an end it would never be tried again, and so never be heard.
        self._silent: dict[str, float] = {}

    def configure(self, choice: ReplicaChoice) -> None:
        """Use another choice from now on; call it before the first request."""
        self.choice = choice

    def update(self, num_pages: Mapping[str, int]) -> None:
        """Set the replicas that take requests, with the length of their caches in pages."""
        self.choice.update(dict(num_pages))
        self._silent = {each: end for each, end in self._silent.items() if each in num_pages}
        self._has_changed.set()
        self.on_update()

    async def other_than(self, avoid: frozenset[str]) -> None:
        """Return when there is a replica that is not to be avoided."""
        while not set(self.choice.replicas) - avoid:
            self._has_changed.clear()
            await self._has_changed.wait()

    def begin(self, request_id: str, asked: Asked) -> None:
        """Note a request that is about to be routed. Call `end` however it ends."""
        self._asked[request_id] = asked

    def rank(self, request_id: str, candidates: Iterable[str]) -> list[str]:
        """Return the replicas to try, best first, and count the request on the first.

        Counted at once, so that requests which are routed together see each other.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            return []  # it has ended meanwhile
        allowed = [each for each in candidates if each not in asked.avoid]
        ranked = self.choice.rank(asked.pages, allowed, request_id)
        if self._silent:
            now = time.monotonic()
            self._silent = {each: end for each, end in self._silent.items() if end > now}
            ranked.sort(key=self._silent.__contains__)
        if ranked:
            self.routed(request_id, ranked[0])
            asked.on_try()
        return ranked

    def routed(self, request_id: str, replica: str) -> None:
        """Note the replica that took a request."""
        asked = self._asked.get(request_id)
        if asked is None or self._replica_of.get(request_id) == replica:
            return
        self._replica_of[request_id] = replica
        self._num_predicted[request_id] = self.choice.routed(request_id, asked.pages, replica)

    def replica_of(self, request_id: str) -> str | None:
        return self._replica_of.get(request_id)

    def fell_silent(self, replica: str) -> None:
        """Try a replica last for some time, or until it is heard again."""
        self._silent[replica] = time.monotonic() + self._silence_lasts_s

    def heard(self, replica: str | None) -> None:
        if replica is not None:
            self._silent.pop(replica, None)

    def num_predicted(self, request_id: str) -> int:
        """Return how many of a request's prompt tokens its replica should have cached."""
        return self._num_predicted.get(request_id, 0)

    def end(self, request_id: str) -> None:
        """Take the load of a request back, however it ended."""
        for each in (self._asked, self._replica_of, self._num_predicted):
            each.pop(request_id, None)
        self.choice.ended(request_id)


ROUTES = Routes()
