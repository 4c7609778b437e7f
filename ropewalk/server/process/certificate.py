"""The check of a certificate's files, before anything heavy is imported."""

import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.server.settings.load import ServeSettings, SettingsError, read_named

if TYPE_CHECKING:
    from ropewalk.server.settings.route_settings import RouteSettings

_CERTIFICATE = re.compile("-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----")
_PEM_TEXT = "latin-1"  # names beside the parts may be in any encoding
_PRIVATE_KEY = re.compile("-----BEGIN ([A-Z]+ )?PRIVATE KEY-----")
_MISMATCHES = (
    "KEY_VALUES_MISMATCH",
    "KEY_TYPE_MISMATCH",
    "NO_CERTIFICATE_ASSIGNED",
)  # OpenSSL's words
# In PKCS#8 and in older formats. OpenSSL would ask for the password at the terminal.
_ENCRYPTED = re.compile("-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: 4,ENCRYPTED")


def check_certificate(settings: "ServeSettings | RouteSettings") -> None:
    """Raise SettingsError if the settings' certificate cannot be used."""
    if settings.ssl_certfile is None:
        return
    _check_pem_files(settings.ssl_certfile, settings.ssl_keyfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except ssl.SSLError as error:
        raise SettingsError(_cannot_use(settings, error)) from error


def _check_pem_files(certificate: Path, key: Path | None) -> None:
    """Raise SettingsError for a file that cannot be read, or without its part in PEM format."""
    if not _CERTIFICATE.search(read_named("ssl_certfile", certificate, _PEM_TEXT)):
        raise SettingsError(f"ssl_certfile: {certificate} has no certificate in PEM format")
    name, path = ("ssl_certfile", certificate) if key is None else ("ssl_keyfile", key)
    text = read_named(name, path, _PEM_TEXT)
    if not _PRIVATE_KEY.search(text):
        other = "" if key is not None else ", and ssl_keyfile names no other file"
        raise SettingsError(f"{name}: {path} has no private key in PEM format{other}")
    if _ENCRYPTED.search(text):
        raise SettingsError(f"{name}: the private key in {path} must have no password")


def _cannot_use(settings: "ServeSettings | RouteSettings", error: ssl.SSLError) -> str:
    """Return the sentence about files in PEM format that OpenSSL refuses."""
    if settings.ssl_keyfile is not None and error.reason in _MISMATCHES:
        found = f"is not the key of the certificate in {settings.ssl_certfile}"
        return f"ssl_keyfile: {settings.ssl_keyfile} {found}"
    beside = "" if settings.ssl_keyfile is None else f" with ssl_keyfile {settings.ssl_keyfile}"
    why = error.reason or str(error)
    return f"ssl_certfile: {settings.ssl_certfile} cannot be used{beside}: OpenSSL says {why}"
