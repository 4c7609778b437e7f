"""The settings of `ropewalk route`: a router in front of servers."""

import os
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ropewalk.model_runtime.setting import setting
from ropewalk.server.settings.config_file import ConfigFileError, read_config_file
from ropewalk.server.settings.fields import HostNames, Names, Section
from ropewalk.server.settings.load import SettingsError
from ropewalk.server.settings.problems import (
    ENV_PREFIX,
    Sources,
    unknown_setting,
    value_problems,
    variable_of,
)
from ropewalk.server.settings.request_sections import (
    AccessSettings,
    HttpSettings,
    LimitSettings,
    LogSettings,
)
from ropewalk.server.settings.sections import SourceSettings

MAX_BODY_BYTES = 32 * 2**20  # default
SILENCE_S = 10.0


def _checked_addresses(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            found = urlsplit(value)
            has_host = bool(found.hostname) and (found.port is None or found.port > 0)
        except ValueError:
            has_host = False
        if not has_host or found.scheme not in {"http", "https"} or found.path not in {"", "/"}:
            raise ValueError("must be addresses as http://10.0.0.1:8000, without a path")
    if len({value.rstrip("/") for value in values}) < len(values):
        raise ValueError("must have each address once")
    return values


def _as_in(section: type[Section], name: str) -> Any:
    """Return the declaration of a setting that `ropewalk serve` has, too."""
    return copy(section.model_fields[name])


class FleetSettings(Section):
    """Servers"""  # noqa: D400  # a heading

    config: Path | None = _as_in(SourceSettings, "config")
    servers: Annotated[Names, AfterValidator(_checked_addresses)] = setting(
        (),
        "Addresses of the servers, as http://10.0.0.1:8000. A name stands for all addresses that "
        "it resolves to.",
        unit="addresses",
    )
    router_key: str | None = setting(
        None,
        "The router_key of the servers. Without it a stream ends with an error if its server is "
        "lost.",
        unit="key",
        min_length=16,
        max_length=256,
        pattern=r"^[\x21-\x7e]+$",
        repr=False,
    )
    check_seconds: float = setting(
        1.0, "Time between two checks of a server's /ready.", unit="seconds", gt=0, le=3600
    )
    silence_seconds: float = setting(
        SILENCE_S,
        "A server that neither sends tokens nor answers /ready for this long is lost.",
        unit="seconds",
        gt=0,
        le=86_400,
    )
    wait_seconds: float = setting(
        60.0,
        "Longest wait of a POST for a server, if there is none.",
        unit="seconds",
        ge=0,
        le=86_400,
    )
    continue_attempts: int = setting(
        3,
        "Times that a request is sent to another server if its server is lost. Bytes that the "
        "client has are compared and skipped. 0: such a request gets an error.",
        unit="attempts",
        ge=0,
        le=100,
    )
    routing: Literal["prefix", "least_loaded", "round_robin"] = setting(
        "prefix",
        "Choice of the server: prefix (least cost in tokens, cached prefixes counted), "
        "least_loaded (the same without prefixes) or round_robin.",
        unit="name",
    )


class EdgeSettings(Section):
    """Clients"""  # noqa: D400  # a heading

    host: str = _as_in(HttpSettings, "host")
    port: int = _as_in(HttpSettings, "port")
    ssl_certfile: Path | None = _as_in(AccessSettings, "ssl_certfile")
    ssl_keyfile: Path | None = _as_in(AccessSettings, "ssl_keyfile")
    allowed_hosts: HostNames = setting(
        (),
        "Host names that requests may have in their Host header, as with `serve`. Default: none "
        "but addresses and local names if host is a loopback address, else any.",
        unit="hosts",
    )
    max_body_bytes: int = setting(
        MAX_BODY_BYTES, "Largest body of a request.", unit="bytes", ge=1024
    )
    max_connections: int = _as_in(LimitSettings, "max_connections")
    shutdown_timeout_seconds: float = _as_in(LimitSettings, "shutdown_timeout_seconds")
    log_format: Literal["logfmt", "json", "console"] = _as_in(LogSettings, "log_format")
    log_level: Literal["debug", "info", "warning", "error"] = _as_in(LogSettings, "log_level")


class RouteSettings(FleetSettings, EdgeSettings, BaseSettings):
    """The settings of `ropewalk route`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, enable_decoding=False)


ROUTE_SECTIONS = (FleetSettings, EdgeSettings)


def load_route_settings(flags: Mapping[str, Any]) -> RouteSettings:
    """Load settings from given flags, environment and file. Raises SettingsError."""
    path = flags.get("config") or os.environ.get(variable_of("config"))
    try:
        in_file = {} if path is None else read_config_file(Path(path))
    except ConfigFileError as error:
        raise SettingsError(str(error)) from error
    known = set(RouteSettings.model_fields) - {"config"}
    problems = [unknown_setting(name, path, known) for name in in_file if name not in known]
    unstated = {
        name: value
        for name, value in in_file.items()
        if name in known and name not in flags and variable_of(name) not in os.environ
    }
    try:
        settings = RouteSettings(**{**unstated, **flags})
    except ValidationError as error:
        problems += value_problems(error, Sources(flags, in_file, path))
    if problems:
        raise SettingsError("\n".join(problems))
    if not settings.servers:
        raise SettingsError("servers must have an address: ropewalk route http://10.0.0.1:8000")
    return settings
