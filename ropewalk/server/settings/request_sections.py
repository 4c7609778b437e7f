"""Settings for requests to the port: HTTP, access and request limits."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Le
from pydantic import Field, field_validator

from ropewalk.model_runtime.setting import setting
from ropewalk.server.settings.fields import (
    GenerationDefaults,
    HostNames,
    Names,
    OffIsAWord,
    Section,
)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpSettings(Section):
    """HTTP"""  # noqa: D400  # a heading

    host: str = setting("127.0.0.1", "Address to listen on.", unit="address", min_length=1)
    port: int = setting(8000, "Port to listen on. 0 picks a free one.", unit="port", ge=0, le=65535)
    sse_keep_alive_seconds: float = setting(
        15.0,
        "Seconds of silence in a stream before a comment is sent to keep proxies from closing"
        " it. 0: never.",
        unit="seconds",
        ge=0,
    )
    stream_interval: int = setting(
        1,
        "Tokens in an event of a stream. The first token is sent alone and at once, and the last "
        "with those that wait.",
        unit="tokens",
        ge=1,
        le=1024,
    )

    @property
    def is_on_loopback(self) -> bool:
        """Return whether only this machine reaches the port."""
        return is_loopback(self.host)


class KeyEntry(Section):
    """The bounds of the API keys of one name."""

    name: str = Field(min_length=1)
    max_running: int | None = Field(None, ge=1)
    max_requests_per_minute: int | None = Field(None, ge=1)


class AccessSettings(Section):
    """Access"""  # noqa: D400  # a heading

    api_key: Names = setting(
        (),
        "Keys that requests may present as `Authorization: Bearer KEY`. Without a key the "
        "server answers every client that reaches the port.",
        unit="keys",
        repr=False,
    )
    api_key_file: Path | None = setting(
        None,
        "File with more keys, one a line, as `name:key` or `key`. A line that begins with # is a "
        "comment.",
        unit="path",
    )
    router_key: str | None = setting(
        None,
        "Key of the router in front (`ropewalk route`), which may then give answers their ids, and "
        "read models and metrics without an API key. Without it no router may.",
        unit="key",
        min_length=16,
        max_length=256,
        pattern=r"^[\x21-\x7e]+$",
        repr=False,
    )
    router_only: bool = setting(
        default=False,
        text="Refuse requests that do not come through that router. /health, /live, /ready and "
        "/version are open.",
        unit="switch",
    )
    keys: tuple[KeyEntry, ...] | None = setting(
        None,
        "Bounds of named keys: a list of objects with a name and max_running or "
        "max_requests_per_minute. The keys themselves are in api_key_file. Default: no bounds.",
        unit="JSON",
    )
    share_prefixes: bool = setting(
        default=False,
        text="Share cached prefixes between API keys with different names. Without it, "
        "cached_tokens counts prefixes of the client's own name only.",
        unit="switch",
    )
    open_metrics: bool = setting(
        default=False, text="Answer /metrics without a key.", unit="switch"
    )
    playground: Literal["auto", "always", "never"] = setting(
        "auto",
        "When /playground/ serves a page to try the model in a browser: always, never or auto "
        "(if host is a loopback address).",
        unit="when",
    )
    ssl_certfile: Path | None = setting(
        None,
        "Certificate chain in PEM format. The server then speaks TLS.",
        unit="path",
        flags=("--ssl-cert-file",),
    )
    ssl_keyfile: Path | None = setting(
        None,
        "Private key of the certificate. Default: the key is in ssl_certfile.",
        unit="path",
        flags=("--ssl-key-file",),
    )
    allowed_origins: Names = setting(
        (),
        "Origins whose web pages may send requests (CORS), for example https://example.org. *"
        " allows any. Browser credentials are never accepted.",
        unit="origins",
    )
    allowed_hosts: HostNames = setting(
        (),
        "Host names that requests may have in their Host header, for example llm.example.org or "
        "*.example.org. Others get 403. Addresses and local names are always allowed, and * allows "
        "any. Default: none more if host is a loopback address and there is no key, else any.",
        unit="hosts",
    )
    access_log: Annotated[Literal["off", "requests", "all"], OffIsAWord] = setting(
        "requests",
        "Requests that have a line in the log: off, requests (those that generate) or all (without "
        "probes and /metrics).",
        unit="name",
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        """Refuse an empty text: a variable that is unset where it is used would open the server."""
        if isinstance(value, str) and not value.strip():
            raise ValueError("must contain a key, leave it out for a server without keys")
        return value


class LogSettings(Section):
    """Log and traces"""  # noqa: D400  # a heading

    log_format: Literal["logfmt", "json", "console"] = setting(
        "logfmt",
        "Format of the log on standard error: logfmt, json (every line is an object, the first "
        "ones too) or console (for people at a terminal).",
        unit="name",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info",
        "Least level of a line: debug, info, warning or error. Lines of the access log are info. "
        "At debug, uvicorn and transformers log more than warnings.",
        unit="name",
        flags=("--uvicorn-log-level",),
    )
    traces: bool = setting(
        default=False,
        text="Send OpenTelemetry spans of requests, as the OTEL_* variables say. Needs the extra "
        "otel.",
        unit="switch",
    )


# A client on a slow line sends the largest body in less. A slower one would only keep memory.
BODY_TIMEOUT_S = 60.0


class LimitSettings(Section):
    """Limits"""  # noqa: D400  # a heading

    max_body_bytes: int | None = setting(
        None,
        "Largest request body. Larger bodies get 413, or 400 as prompts beyond the longest "
        "context. Default: 1 MiB, and 64 bytes for each token of that context.",
        unit="bytes",
        ge=1024,
    )
    max_connections: int = setting(
        1024,
        "Most open connections. While there are so many, every request gets 503.",
        unit="connections",
        ge=1,
    )
    max_request_seconds: float | None = setting(
        None,
        "Longest time of a request, and the default of its `max_time`. A router that sends a "
        "request again begins anew. Default: no bound.",
        unit="seconds",
        gt=0,
        le=86_400,
    )
    max_n: int = setting(16, "Most answers to a prompt (n, best_of).", unit="answers", ge=1, le=128)
    override_generation_config: GenerationDefaults = setting(
        None,
        "Defaults of requests, laid over those of the model's files: temperature, top_p, top_k, "
        "min_p and repetition_penalty; and max_new_tokens, which bounds all answers. Example: "
        '{"temperature": 0.6, "max_new_tokens": 512}.',
        unit="JSON",
    )
    shutdown_timeout_seconds: float = setting(
        30.0,
        "Time for running requests to finish after SIGTERM. Then they end with an error.",
        unit="seconds",
        ge=0,
    )


def largest(name: str) -> int:
    """Return the largest value of a limit, which is the bound in the schemas of bodies."""
    bounds = LimitSettings.model_fields[name].metadata
    return next(int(str(each.le)) for each in bounds if isinstance(each, Le))


class ReplicaSettings(Section):
    """Replicas"""  # noqa: D400  # a heading

    replicas: int | None = setting(
        None,
        "Serve with this many servers on Ray Serve (extra `ray`), and a router in front. They "
        "run on the cluster that RAY_ADDRESS names, or on one of this machine. Default: one engine "
        "in this process, without Ray.",
        unit="servers",
        ge=1,
        le=1024,
    )
    max_replicas: int | None = setting(
        None,
        "Add servers up to this number while tokens wait, and remove them again. Default: "
        "`replicas`.",
        unit="servers",
        ge=1,
        le=1024,
    )
