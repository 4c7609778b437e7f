"""The application for those who run Ray already.

The command is `serve run ropewalk.server.ray_app:build replicas=2`. A Serve YAML file names it as
`import_path`, with the same arguments under `args` (docs/guide/scaling-out.md).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.gate import key_table_of

if TYPE_CHECKING:
    from ray import serve


def build(arguments: Mapping[str, Any]) -> "serve.Application":
    """Build the application from settings by name, as in the YAML file of `ropewalk serve`.

    Host, port and TLS are those of Ray Serve's proxy. Raises SettingsError.
    """
    from ropewalk.server.ray.deployments import application  # noqa: PLC0415  # Ray is an extra

    for name in ("host", "port", "ssl_certfile", "ssl_keyfile"):
        if name in arguments:
            raise SettingsError(
                f"{name} belongs to Ray Serve here: set it for its proxy, got {arguments[name]!r}"
            )
    settings = load_settings({"replicas": 1, **arguments})
    key_table_of(settings)  # its problems are told at once
    return application(settings)
