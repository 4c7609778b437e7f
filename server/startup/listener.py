"""The listening socket and its TLS context, made before anything heavy is imported."""

import socket
import ssl
from typing import Any

from server.settings.load import ServeSettings, SettingsError

# family, kind, protocol, canonical name, address
Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


def bound_socket(settings: ServeSettings) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises SettingsError."""
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
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from error
    return listener


def address_of(settings: ServeSettings) -> Address:
    """Return the address of host and port, in the format of getaddrinfo. Raises SettingsError."""
    try:
        return socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _cannot_listen(settings, error) from error


def _cannot_listen(settings: ServeSettings, error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot listen on host {settings.host}, port {settings.port}: {error.strerror}"
    )


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """Return the context of the settings' certificate, or None without one. Raises SettingsError.

    uvicorn makes its own from the same files.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:  # ssl's errors are subclasses of it
        files = f"{settings.ssl_certfile}, {settings.ssl_keyfile or 'no key file'}"
        raise SettingsError(f"ssl_certfile, ssl_keyfile: {error} ({files})") from error
    return context


def url_of(settings: ServeSettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
