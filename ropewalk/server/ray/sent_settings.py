"""The settings of a server that an actor starts, and those of the router in front of it."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ropewalk.server.playground.page_files import has_playground
from ropewalk.server.process.torch_build import has_nvidia_gpu
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.settings.request_sections import ReplicaSettings
from ropewalk.server.settings.route_settings import (
    MAX_BODY_BYTES,
    MAX_TOTAL_BODY_BYTES,
    EdgeSettings,
    RouteSettings,
)

_OF_THE_EDGE = {"config", "host", "port", "ssl_certfile", "ssl_keyfile", "allowed_hosts"}
# The router adds at most its key, an identity, a request id and the framing to a head.
_SPARE_HEADER_BYTES = 2048
_STEP_TOKENS = 2048  # the least of the defaults; the device of an actor is not known here
_SPARE_CONNECTIONS = 16  # of a server, beside requests: looks at its health and its metrics


@dataclass(frozen=True, slots=True)
class SentSettings:
    """Settings that go to an actor."""

    stated: Mapping[str, Any] = field(repr=False)  # as a file would have them; has keys
    host: str | None  # to listen on; None: the node's address
    router_key: str = field(repr=False)
    num_threads: int
    max_step_tokens: int
    shutdown_s: float
    log_format: Literal["logfmt", "json", "console"]
    log_level: Literal["debug", "info", "warning", "error"]

    @classmethod
    def of(
        cls, settings: ServeSettings, router_key: str, host: str | None = None
    ) -> "SentSettings":
        """Return what each of the servers gets."""
        num_threads = threads_of(settings)
        edge = {*_OF_THE_EDGE, *ReplicaSettings.model_fields}
        stated = settings.model_dump(mode="json", exclude_unset=True, exclude=edge)
        own = {
            "router_key": router_key,
            "router_only": True,
            "threads": num_threads,
            # By the public address, not by its own.
            "playground": "always" if has_playground(settings) else "never",
            "max_connections": settings.max_connections + _SPARE_CONNECTIONS,
            "max_header_bytes": settings.max_header_bytes + _SPARE_HEADER_BYTES,
        }
        return cls(
            {**stated, **own},
            host,
            router_key,
            num_threads,
            settings.max_num_batched_tokens or _STEP_TOKENS,
            settings.shutdown_timeout_seconds,
            settings.log_format,
            settings.log_level,
        )


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
    of_all, of_one = settings.max_total_body_bytes, settings.max_body_bytes
    if of_one is None and of_all is not None:
        stated["max_body_bytes"] = min(MAX_BODY_BYTES, of_all)
    if of_all is None and of_one is not None:
        stated["max_total_body_bytes"] = max(MAX_TOTAL_BODY_BYTES, 4 * of_one)
    return RouteSettings(**stated, router_key=router_key)
