"""The request router that Ray Serve runs in the process of each handle to the engines."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ropewalk.server.replicas import routes
from ropewalk.server.replicas.choice import ReplicaChoice

_Result = Any  # of Ray, not public


class CostRouter(RequestRouter):
    """Routes `generate` by cost in tokens, and calls that name a replica to that one."""

    def initialize_state(self, **settings: Any) -> None:
        routes.ROUTES.configure(ReplicaChoice(settings["routing"], settings["decode_weight"]))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Learn of the replicas that take requests from now on."""
        super().update_replicas(replicas)
        routes.ROUTES.update(
            {
                _id_of(replica): int(replica.replica_metadata.get("num_pages", 1))
                for replica in self.curr_replicas.values()
            }
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica a rank, best first; without a request, all in one rank."""
        if pending_request is None:
            return [candidate_replicas]
        # If no replica takes the request, ask again later rather than at once.
        pending_request.routing_context.should_backoff = True
        asked = pending_request.kwargs
        by_id = {_id_of(replica): replica for replica in candidate_replicas}
        if "replica" in asked:
            named = by_id.get(asked["replica"])
            return [[named]] if named is not None else []
        if "request_id" not in asked:
            return [candidate_replicas]
        return [[by_id[each]] for each in routes.ROUTES.rank(asked["request_id"], by_id)]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: _Result,  # noqa: ARG002
    ) -> None:
        request_id = pending_request.kwargs.get("request_id")
        if request_id is not None:
            routes.ROUTES.routed(request_id, replica_id.unique_id)


def _id_of(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
