"""The request router of Ray Serve: it hears of all replicas, and tells the addresses of servers.

Ray runs it in the process of each handle to the servers. Requests of clients do not pass it.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from ropewalk.server.ray import addresses


class AddressRouter(RequestRouter):
    """Notes the addresses of the servers; the few calls of a handle go to any of them."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Learn of the replicas that run from now on."""
        super().update_replicas(replicas)
        found = (each.replica_metadata.get("url") for each in self.curr_replicas.values())
        # By its module, because Ray sends this class by value.
        addresses.ADDRESSES.update(str(url) for url in found if url)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        """Return all replicas in one rank."""
        return [candidate_replicas]
