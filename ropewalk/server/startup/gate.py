"""The checks of settings that need no model, and the access policy that is built from them.

Access is API keys, key file, origins and body limits. The checks import nothing heavy.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk.model_runtime.errors import ModelError
from ropewalk.server.access.keys import (
    KEY_RULE,
    NAME_RULE,
    UNNAMED,
    ApiKey,
    KeyBounds,
    KeyLineError,
    KeyTable,
    digest_of,
    is_key,
    is_name,
    key_under_two_names,
    named_key,
)
from ropewalk.server.playground.page_files import has_playground
from ropewalk.server.process.certificate import check_certificate
from ropewalk.server.settings.load import (
    ServeSettings,
    SettingsError,
    chat_template_text,
    read_named,
)
from ropewalk.server.settings.problems import shown
from ropewalk.server.settings.request_sections import BODY_TIMEOUT_S
from ropewalk.server.startup.named_places import (
    check_disk,
    check_ray,
    check_store,
    check_traces,
    spans_of,
)

if TYPE_CHECKING:
    from ropewalk.server.settings.route_settings import RouteSettings

# family, kind, protocol, canonical name, address
Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


_BACKLOG = 2048  # uvicorn's


def listening_socket(settings: "ServeSettings | RouteSettings") -> socket.socket:
    """Return a socket whose connections wait to be accepted. Raises SettingsError."""
    family, kind, protocol, _, address = address_of(settings)
    try:
        # The protocol is explicit, because asyncio turns Nagle's delay off only for sockets with
        # TCP as their protocol. With the delay, a token waits up to 40 ms for the client's
        # acknowledgement.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from error
    return listener


def address_of(settings: "ServeSettings | RouteSettings") -> Address:
    """Return the address of host and port, in the format of getaddrinfo. Raises SettingsError."""
    try:
        return socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _cannot_listen(settings, error) from error


def _cannot_listen(settings: "ServeSettings | RouteSettings", error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot listen on host {settings.host}, port {settings.port}: {error.strerror}"
    )


def url_of(settings: "ServeSettings | RouteSettings", listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


if TYPE_CHECKING:
    from ropewalk.server.access.key_ring import KeyRing
    from ropewalk.server.middleware.body_limits import BodyLimits
    from ropewalk.server.middleware.host_check import AllowedHosts
    from ropewalk.server.startup.app import AccessPolicy


_Found = TypeVar("_Found")
_MAX_NAMES = 200  # each has series in the metrics
# A body has room for schemas, biases and many prompts of token ids, and then for the longest
# context: a token is 4 to 12 bytes of JSON, and at most a handful of values (a message of one word
# has four).
_BODY_BYTES, _BODY_BYTES_OF_A_TOKEN = 2**20, 64
_BODY_NUMBERS_OF_A_TOKEN = 4
# Of all that arrive or wait to be parsed. Four of the largest bodies fit in any case.
_ALL_BODIES_BYTES = 256 * 2**20
_JSON_DEPTH, _JSON_VALUES = 64, 131_072  # the context's numbers are added to these


class Problems:
    """The errors of several checks, so that all are told at once."""

    def __init__(self) -> None:
        self._errors: list[SettingsError | ModelError] = []

    def tried(self, check: Callable[[], _Found]) -> _Found | None:
        """Return what a check returns; None if it has raised SettingsError or ModelError."""
        try:
            return check()
        except (SettingsError, ModelError) as error:
            self._errors.append(error)
            return None

    def refuse(self) -> None:
        """Raise SettingsError with a line for each sentence; raise the only error as it is."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            lines = "\n".join(map(str, self._errors)).split("\n")
            raise SettingsError("\n".join(dict.fromkeys(lines)))


def checked(settings: ServeSettings) -> KeyTable:
    """Return the keys. Raises SettingsError with a line for each problem of the settings."""
    problems = Problems()
    keys = problems.tried(lambda: checked_files(settings))
    problems.tried(lambda: chat_template_text(settings))
    problems.tried(lambda: address_of(settings))
    problems.refuse()
    assert keys is not None, "it was read without a problem"
    return keys


def checked_files(settings: ServeSettings) -> KeyTable:
    """Return the keys. Raises SettingsError with a line for each file or package that is wrong."""
    problems = Problems()
    keys = problems.tried(lambda: key_table_of(settings))
    problems.tried(lambda: check_certificate(settings))
    problems.tried(lambda: check_traces(settings))
    problems.tried(lambda: check_disk(settings))
    problems.tried(lambda: check_store(settings))
    problems.tried(lambda: check_ray(settings))
    problems.refuse()
    assert keys is not None, "it was read without a problem"
    return keys


def key_table_of(settings: ServeSettings) -> KeyTable:
    """Return the keys of the settings and of the key file, with their bounds.

    Raises SettingsError if the key file cannot be read or holds no key, or if a line is malformed,
    or a key has two names. Bounds for a name that no key has raise it, too.
    """
    for number, key in enumerate(settings.api_key, start=1):
        if not is_key(key):
            raise SettingsError(f"api_key: key {number} must be {KEY_RULE}")
    pairs = [(UNNAMED, key) for key in settings.api_key]
    if settings.api_key_file is not None:
        pairs += _in_file(settings.api_key_file)
    names = list(dict.fromkeys(name for name, _ in pairs))
    if len(names) > _MAX_NAMES:
        raise SettingsError(
            f"api_key_file: must have at most {_MAX_NAMES} different names, got {len(names)}"
        )
    shared = key_under_two_names(pairs)
    if shared is not None:
        raise SettingsError(f"api_key_file: {shared[0]} and {shared[1]} have the same key")
    bounds = {}
    for entry in settings.keys or ():
        if not is_name(entry.name):
            raise SettingsError(f"keys: name must be {NAME_RULE}, got {shown(entry.name)}")
        if entry.name not in names:
            raise SettingsError(
                f"keys: {entry.name} has no key, add a line `{entry.name}:KEY` to api_key_file"
            )
        bounds[entry.name] = KeyBounds(entry.max_running, entry.max_requests_per_minute)
    return KeyTable(tuple(ApiKey(name, digest_of(key)) for name, key in pairs), bounds)


def _in_file(path: Path) -> list[tuple[str, str]]:
    """Return names and keys of a key file, without its comments. Raises SettingsError."""
    text = read_named("api_key_file", path)
    found = []
    for number, line in enumerate(map(str.strip, text.split("\n")), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            found.append(named_key(line))
        except KeyLineError as error:
            raise SettingsError(f"api_key_file: {path}, line {number}: {error}") from error
    if not found:
        # Without a key the server would accept every client.
        raise SettingsError(f"api_key_file: {path} contains no key")
    return found


def access_policy_of(
    settings: ServeSettings, ring: "KeyRing | None", max_len: int
) -> "AccessPolicy":
    """Build the access policy from the settings, the keys in force and the longest context."""
    # Imported here, because the keys are read before FastAPI is imported.
    from ropewalk.server.startup.app import AccessPolicy  # noqa: PLC0415

    # Without a key, a web page that reaches the port as its own origin could use the server.
    is_open = settings.is_on_loopback and ring is None
    return AccessPolicy(
        key_ring=ring,
        router_key=settings.router_key,
        router_only=settings.router_only,
        open_metrics=settings.open_metrics,
        has_playground=has_playground(settings),
        spans=spans_of(settings),
        access_log=None if settings.access_log == "off" else settings.access_log,
        allowed_origins=settings.allowed_origins,
        hosts=allowed_hosts_of(settings, is_open=is_open),
        body=body_limits_of(settings, max_len),
    )


def allowed_hosts_of(
    settings: "ServeSettings | RouteSettings", *, is_open: bool
) -> "AllowedHosts | None":
    """Return the allowed hosts; None: any. `is_open`: they are checked though none is named."""
    from ropewalk.server.middleware.host_check import AllowedHosts  # noqa: PLC0415

    if "*" in settings.allowed_hosts or not (settings.allowed_hosts or is_open):
        return None
    return AllowedHosts.of(settings.allowed_hosts)


def body_limits_of(settings: ServeSettings, max_len: int) -> "BodyLimits":
    """Build the limits of bodies; those without a setting follow from the longest context."""
    from ropewalk.server.middleware.body_limits import BodyLimits  # noqa: PLC0415

    max_bytes = settings.max_body_bytes
    if max_bytes is None:
        max_bytes = _BODY_BYTES + _BODY_BYTES_OF_A_TOKEN * max_len
    return BodyLimits(
        max_bytes,
        _JSON_DEPTH,
        _JSON_VALUES,
        _JSON_VALUES + _BODY_NUMBERS_OF_A_TOKEN * max_len,
        max(_ALL_BODIES_BYTES, 4 * max_bytes),
        BODY_TIMEOUT_S,
        max_len,
    )
