"""The two deployments of Ray Serve: the API, and the engines behind it."""

import os
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ropewalk.server.access.keys import KeyTable
from ropewalk.server.process.preflight import bound_primitives, wait_briefly
from ropewalk.server.process.torch_build import has_nvidia_gpu
from ropewalk.server.ray.api_replica import ApiReplica
from ropewalk.server.ray.engine_replica import EngineReplica
from ropewalk.server.settings.load import ServeSettings

_HEALTH_PERIOD_S = 2.0
_FAREWELL_S = 10.0  # after the time that running requests have
_MOST_STARTS = 3  # of an engine that never began; a wrong model fails each time
_SPARE_CALLS = 16  # of an engine, beside requests: descriptions and metrics

# Read by Ray when it is imported in a replica's process. Outputs go from process to process without
# the object store, and the router and our code share one event loop.
_RAY_ENVIRONMENT = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}


def application(
    settings: ServeSettings,
    keys: KeyTable,
    *,
    listener: str | None = None,
    api_resources: dict[str, float] | None = None,
) -> serve.Application:
    """Return the application for `serve.run`.

    `listener`: where the command lends its socket; None: Ray Serve's proxy passes requests on.
    `api_resources`: Ray's resources that tie the API to a machine.
    """
    api = serve.deployment(
        serve.ingress()(ApiReplica),  # its method builds the application
        name="Api",
        max_ongoing_requests=settings.max_connections,
        ray_actor_options={
            "num_cpus": 0,
            "resources": api_resources or {},
            "runtime_env": _environment({"OMP_NUM_THREADS": "1"}),
        },
        **_lifetime(settings),
    )
    return api.bind(settings, keys, _engines(settings), listener)


def _engines(settings: ServeSettings) -> Any:
    number = settings.replicas or 1
    most = max(number, settings.max_replicas or 0)  # each of them has to find its processors
    num_processes = most * settings.tensor_parallel_size
    num_threads = settings.threads or max(1, (os.cpu_count() or 1) // num_processes)
    has_gpu = settings.device != "cpu" and has_nvidia_gpu()
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
        EngineReplica,
        name="Engine",
        max_ongoing_requests=settings.max_num_seqs + settings.max_queued_requests + _SPARE_CALLS,
        max_constructor_retry_count=_MOST_STARTS,
        request_router_config=RequestRouterConfig(
            request_router_class="ropewalk.server.ray.router.CostRouter",
            request_router_kwargs={
                "routing": settings.routing,
                "decode_weight": settings.routing_decode_weight,
            },
        ),
        ray_actor_options={
            "num_cpus": 0 if has_gpu else min(num_threads, (os.cpu_count() or 1) / most),
            "num_gpus": settings.tensor_parallel_size if has_gpu else 0,
            "runtime_env": _environment(_engine_variables(num_threads)),
        },
        **_lifetime(settings),
        **options,
    )
    return deployment.bind(settings.model_copy(update={"threads": num_threads}))


def _engine_variables(num_threads: int) -> dict[str, str]:
    """Return what torch and its libraries read from the environment when they are imported."""
    variables = {"OMP_NUM_THREADS": str(num_threads)}
    wait_briefly(variables)
    bound_primitives(variables)
    return variables


def _lifetime(settings: ServeSettings) -> dict[str, float]:
    """Return how Ray looks after a replica, and lets it end."""
    return {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": settings.replica_silence_seconds,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.shutdown_timeout_seconds + _FAREWELL_S,
    }


def _environment(variables: dict[str, str]) -> dict[str, dict[str, str]]:
    return {"env_vars": {**_RAY_ENVIRONMENT, **variables}}


def api_handle(application_name: str) -> DeploymentHandle:
    return serve.get_deployment_handle("Api", application_name)
