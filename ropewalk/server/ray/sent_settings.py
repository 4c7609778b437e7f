"""The settings of a server that an actor starts, and those of the router in front of it."""

import os
import secrets

from ropewalk.server.playground.page_files import has_playground
from ropewalk.server.process.torch_build import has_nvidia_gpu
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.request_sections import ReplicaSettings
from ropewalk.server.settings.route_settings import EdgeSettings, RouteSettings

_OF_THE_EDGE = (
    *("config", "host", "port", "ssl_certfile", "ssl_keyfile", "allowed_hosts"),
    *ReplicaSettings.model_fields,
)
_SPARE_CONNECTIONS = 16  # of a server, beside requests: looks at its health and its metrics


def sent_settings(settings: ServeSettings, router_key: str) -> ServeSettings:
    """Return the settings of each of the servers, but for their host."""
    fields = ServeSettings.model_fields
    own = {
        "port": 0,
        "router_key": router_key,
        "router_only": True,
        "threads": threads_of(settings),
        # By the public address, not by its own.
        "playground": "always" if has_playground(settings) else "never",
        "max_connections": settings.max_connections + _SPARE_CONNECTIONS,
    }
    defaults = {name: fields[name].default for name in _OF_THE_EDGE}
    return settings.model_copy(update={**defaults, **own})


def most_replicas(settings: ServeSettings) -> int:
    """Return the number of replicas that have to find their processors."""
    return max(settings.replicas or 1, settings.max_replicas or 0)


def threads_of(settings: ServeSettings) -> int:
    """Return the threads of each process that computes."""
    num_processes = most_replicas(settings) * settings.tensor_parallel_size
    return settings.threads or max(1, (os.cpu_count() or 1) // num_processes)


def num_gpus_of(settings: ServeSettings) -> int:
    """Return the GPUs of each replica."""
    has_gpu = settings.device != "cpu" and has_nvidia_gpu()
    return settings.tensor_parallel_size if has_gpu else 0


def new_router_key() -> str:
    return secrets.token_urlsafe(32)


def route_settings_of(settings: ServeSettings, router_key: str) -> RouteSettings:
    """Return the settings of the router in front of the servers."""
    edge = {name: getattr(settings, name) for name in EdgeSettings.model_fields}
    stated = {name: value for name, value in edge.items() if value is not None}
    return RouteSettings(**stated, router_key=router_key)
