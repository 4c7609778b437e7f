"""SIGHUP: deployments, API keys and their bounds are read again while requests run, all or nothing.

Requests that run keep the deployment and the allowance that they began with. Nothing else can
change without a new process: a warning names settings that differ from those in effect.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.server.access.keys import KeyTable, changes_between
from ropewalk.server.api.service import Service
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.server.settings.sections import DeploymentSettings
from ropewalk.server.startup.gate import key_table_of
from ropewalk.server.startup.planning.planned_deployments import (
    num_profiles,
    plan_deployments,
    profiles_of,
    within_cache,
)

# The settings that a reload puts in force. The file of keys is read, too, under an unchanged name.
RELOADED = frozenset(
    {"deployments", "served_model_name", "model_aliases", "keys", "api_key", "api_key_file"}
    | set(DeploymentSettings.model_fields)
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """Deployments and keys that were read and checked, and are not in force yet."""

    deployments: tuple[Deployment, ...]
    aliases: Mapping[str, str]
    keys: KeyTable
    ignored: tuple[str, ...]  # settings that differ and cannot change


def check_table_room(deployments: Iterable[Deployment], room: int, *, is_on_gpu: bool) -> None:
    """Raise SettingsError if a GPU has no room for the tables of all deployments.

    More tables would take memory that the cache has, and every captured step would be captured
    again. A CPU makes more room when a request needs it.
    """
    num_tables = num_profiles(deployments)
    if is_on_gpu and num_tables > room:
        raise SettingsError(
            f"deployments: the old and the new ones need {num_tables} rotation tables, but the GPU "
            f"has room for {room} since the start: restart the server"
        )


def check_released_pages(deployments: Iterable[Deployment], served: Iterable[Deployment]) -> None:
    """Raise SettingsError for a first method that releases pages while a request runs.

    Only a start knows whether the model has layers that would read them.
    """
    new, before = (
        {
            profile.positions.method
            for profile in profiles_of(each)
            if profile.positions is not None and profile.positions.kept is not None
        }
        for each in (deployments, served)
    )
    if new - before:
        raise SettingsError(
            f"deployments: positions {', '.join(new)} was in no deployment at the start, where the "
            "model's layers are checked: restart the server"
        )


class Reloader:
    """Reads the settings again, and puts in force what can change."""

    def __init__(self, flags: Mapping[str, Any], settings: ServeSettings, service: Service) -> None:
        """Take the flags of the command line, and the settings and service that they resulted in.

        A process cannot see its environment change, so what differs is in the file.
        """
        self._flags = flags
        self._started_with = settings
        self._service = service
        # Rotation tables are never removed, so those of earlier deployments take room, too.
        self._ever_served = list(service.deployments.values())
        self._lock = asyncio.Lock()

    async def reload(self) -> None:
        """Read and apply, one reload after the other; what happened is in the log."""
        async with self._lock:
            try:
                # Off the event loop: files are read, and tables are computed.
                read = await asyncio.to_thread(self._read)
            except SettingsError as error:
                for problem in str(error).splitlines():
                    _log.error("reload_refused", problem=problem)
                return
            except Exception:  # noqa: BLE001  # a fault of ours must not end the server
                _log.exception("reload_refused", problem="an unexpected error")
                return
            self._apply(read)

    def _read(self) -> _Read:
        """Read everything. Raises SettingsError."""
        settings, before, service = load_settings(self._flags), self._started_with, self._service
        fixed = {
            name: getattr(before, name)
            for name in ServeSettings.model_fields
            if name not in RELOADED
        }
        ignored = sorted(name for name, value in fixed.items() if getattr(settings, name) != value)
        keys = key_table_of(settings)
        if bool(keys.keys) != (service.key_ring is not None):
            had = "with" if service.key_ring is not None else "without"
            raise SettingsError(
                f"api_key, api_key_file: the server was started {had} keys, and to change that "
                "needs a restart"
            )
        # As the running model has it, whatever the file says of the model now.
        settings = settings.model_copy(update=fixed)
        config = service.engine.config
        deployments = within_cache(settings, plan_deployments(settings, service.native), config)
        too_long = [each for each in deployments if each.max_len > config.max_model_len]
        if too_long:
            raise SettingsError(
                "\n".join(
                    f"deployments: {each.name}: the longest context is {each.max_len} tokens, but "
                    f"the server was started for {config.max_model_len}: restart it, or set "
                    "max_model_len"
                    for each in too_long
                )
            )
        check_table_room(
            [*self._ever_served, *deployments],
            config.num_rope_tables,
            is_on_gpu=service.is_on_gpu,
        )
        check_released_pages(deployments, self._ever_served)
        return _Read(deployments, settings.model_aliases or {}, keys, tuple(ignored))

    def _apply(self, read: _Read) -> None:
        """Put everything in force between two requests."""
        service = self._service
        before = dict(service.deployments)
        after = {deployment.name: deployment for deployment in read.deployments}
        service.replace_deployments(after, read.aliases)
        self._ever_served += [each for each in read.deployments if each not in self._ever_served]
        keys = changes_between(KeyTable(), read.keys)
        if service.key_ring is not None:
            keys = changes_between(service.key_ring.table, read.keys)
            service.key_ring.replace(read.keys)
        if read.ignored:
            _log.warning(
                "reload_ignored",
                settings=", ".join(read.ignored),
                problem="these differ from the settings in effect, and need a restart",
            )
        _log.info(
            "reloaded",
            deployments=", ".join(after),
            added=", ".join(name for name in after if name not in before),
            changed=", ".join(
                name for name in after if name in before and after[name] != before[name]
            ),
            removed=", ".join(name for name in before if name not in after),
            keys=len(read.keys.keys),
            keys_added=", ".join(keys.added),
            keys_changed=", ".join(keys.changed),
            keys_removed=", ".join(keys.removed),
        )
