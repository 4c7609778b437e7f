"""The addresses of the servers that run: Ray tells them to the request router of each handle.

Ray makes that router itself, so the two meet in one object of the process. Requests of clients do
not pass it.
"""

import threading
from collections.abc import Callable, Iterable

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

Follower = Callable[[list[str]], None]


class Addresses:
    """The last known addresses, and who is told of changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls: list[str] = []
        self._follower: Follower | None = None

    def update(self, urls: Iterable[str]) -> None:
        """Note the addresses of all servers."""
        with self._lock:
            self._urls = sorted(urls)
            if self._follower is not None:
                self._follower(self._urls)

    def follow(self, follower: Follower) -> None:
        """Call `follower` with the addresses now, and at each change, in whatever thread."""
        with self._lock:
            self._follower = follower
            follower(self._urls)


ADDRESSES = Addresses()  # of this process


class AddressRouter(RequestRouter):
    """Notes the addresses of the servers; the few calls of a handle go to any of them."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Learn of the replicas that run from now on."""
        # Ray sends this class by value, with a copy of what it reads of its module.
        from ropewalk.server.ray.addresses import ADDRESSES as OF_THIS_PROCESS  # noqa: PLC0415

        super().update_replicas(replicas)
        found = (each.replica_metadata.get("url") for each in self.curr_replicas.values())
        OF_THIS_PROCESS.update(str(url) for url in found if url)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        """Return all replicas in one rank."""
        return [candidate_replicas]
