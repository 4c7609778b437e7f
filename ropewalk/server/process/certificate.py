"""The check of a certificate's files, before anything heavy is imported."""

import ssl
from typing import TYPE_CHECKING

from ropewalk.server.settings.load import ServeSettings, SettingsError

if TYPE_CHECKING:
    from ropewalk.server.settings.route_settings import RouteSettings


def check_certificate(settings: "ServeSettings | RouteSettings") -> None:
    """Raise SettingsError if the settings' certificate cannot be used."""
    if settings.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password, OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except OSError as error:  # OpenSSL's own error is one
        beside = "" if settings.ssl_keyfile is None else f" with ssl_keyfile {settings.ssl_keyfile}"
        raise SettingsError(
            f"ssl_certfile: cannot use {settings.ssl_certfile}{beside}: {error.strerror}; both "
            "must be in PEM format, and the key without a password"
        ) from error
