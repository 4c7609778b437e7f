"""The listening socket and its TLS context, made before anything heavy is imported."""

import socket
import ssl

from server.settings.load import ServeSettings, SettingsError


def bound_socket(settings: ServeSettings) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises SettingsError."""
    try:
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = addresses[0]
        # The protocol is explicit, because asyncio turns Nagle's delay off only for sockets with
        # TCP as their protocol. With the delay, a token waits up to 40 ms for the client's
        # acknowledgement.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on host {settings.host}, port {settings.port}: {error.strerror}"
        ) from error
    return listener


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
        raise SettingsError(f"ssl_certfile, ssl_keyfile: {error}") from error
    return context


def url_of(settings: ServeSettings, listener: socket.socket) -> str:
    """Return the address that clients use."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
