"""The address of a networked store of pages. Its password is shown nowhere."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_TLS_BY_SCHEME = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
_DEFAULT_PORT = 6379
_CA_FILE = "ssl_ca_certs"
NEEDS_CLIENT = "needs the client of Valkey: pip install 'valkey>=6.1'"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of the address."""

    scheme: str
    host: str
    port: int
    database: int
    user: str | None
    password: str | None = field(repr=False)
    ca_file: Path | None  # of the certificate authority; None: those of the system

    @property
    def is_tls(self) -> bool:
        return _TLS_BY_SCHEME[self.scheme]

    @property
    def shown(self) -> str:
        """Return the address as logs and the banner may show it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.database}"


def parse_store_url(text: str) -> StoreUrl:
    """Parse the address. Raises ValueError with a sentence that does not hold the address."""
    form = "must be valkey://[USER:PASSWORD@]HOST[:PORT][/DATABASE], or valkeys:// for TLS"
    try:
        parts = urlsplit(text)
        port = _DEFAULT_PORT if parts.port is None else parts.port
        database = int(parts.path.removeprefix("/") or "0")
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError(form) from None
    is_whole = bool(parts.hostname) and port > 0 and database >= 0 and not parts.fragment
    if parts.scheme not in _TLS_BY_SCHEME or parts.hostname is None or not is_whole:
        raise ValueError(form)
    has_ca = set(options) == {_CA_FILE} and _TLS_BY_SCHEME[parts.scheme]
    if options and not has_ca:
        raise ValueError(f"may have the option {_CA_FILE} behind valkeys://, and no other")
    return StoreUrl(
        parts.scheme,
        parts.hostname,
        port,
        database,
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        Path(options[_CA_FILE][0]) if options else None,
    )
