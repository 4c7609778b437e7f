"""The deployments of Ray Serve: the servers, and for those who run Ray already, the router."""

import os
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from ropewalk.server.ray.api_replica import ApiReplica
from ropewalk.server.ray.sent_settings import (
    most_replicas,
    new_router_key,
    num_gpus_of,
    sent_settings,
    threads_of,
)
from ropewalk.server.ray.server_replica import ServerReplica
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.route_settings import SILENCE_S

SERVERS = "Server"
_HEALTH_PERIOD_S = 2.0
_FAREWELL_S = 10.0  # after the time that running requests have
_MOST_STARTS = 3  # of a server that never began; a wrong model fails each time


def servers(settings: ServeSettings, router_key: str, host: str | None = None) -> serve.Application:
    """Return the servers as an application for `serve.run`.

    `host`: the address that they listen on; None: that of their node.
    """
    number, most = settings.replicas or 1, most_replicas(settings)
    num_gpus = num_gpus_of(settings)
    options: dict[str, Any] = {"num_replicas": number}
    if most > number:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=number,
                max_replicas=most,
                policy=AutoscalingPolicy(policy_function="ropewalk.server.ray.autoscale:by_tokens"),
            )
        }
    deployment = serve.deployment(
        ServerReplica,
        name=SERVERS,
        max_constructor_retry_count=_MOST_STARTS,
        request_router_config=RequestRouterConfig(
            request_router_class="ropewalk.server.ray.addresses.AddressRouter"
        ),
        ray_actor_options={
            "num_cpus": 0 if num_gpus else min(threads_of(settings), (os.cpu_count() or 1) / most),
            "num_gpus": num_gpus,
        },
        **_lifetime(settings),
        **options,
    )
    return deployment.bind(sent_settings(settings, router_key), host)


def application(settings: ServeSettings) -> serve.Application:
    """Return the servers behind a router that answers what Ray Serve's proxy passes on."""
    router_key = new_router_key()
    api = serve.deployment(
        serve.ingress()(ApiReplica),  # its method builds the application
        name="Api",
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={"num_cpus": 0},
        **_lifetime(settings),
    )
    return api.bind(settings, router_key, servers(settings, router_key))


def _lifetime(settings: ServeSettings) -> dict[str, float]:
    """Return how Ray looks after a replica, and lets it end."""
    return {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": SILENCE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout_seconds + _FAREWELL_S,
    }
