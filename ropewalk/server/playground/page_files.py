"""The page's own files, with headers that let it load nothing else.

Sources: W3C, Content Security Policy Level 3; W3C, Trusted Types.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ropewalk.server.settings.load import ServeSettings

FOLDER = Path(__file__).parent / "assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files by their path below the server's root. `/playground/` is the page itself."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        name = "" if path.name == "index.html" else path.name
        found[f"/playground/{name}"] = PageFile(content, _TYPES[path.suffix], etag)
    return found


def has_playground(settings: ServeSettings) -> bool:
    """Return whether the page is served. The routes that it calls keep their keys in any case."""
    if settings.playground != "auto":
        return settings.playground == "always"
    return settings.is_on_loopback
