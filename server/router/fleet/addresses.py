"""The servers behind an address, whose name may stand for several."""

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from ropewalk.server.router.upstream import Target


async def targets_of(address: str) -> list[Target]:
    """Return the targets of an address. Raises OSError or UnicodeError if its name has none."""
    parts = urlsplit(address)
    host, is_tls = str(parts.hostname), parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    hosts = [host]
    if not _is_number(host):
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Both families of one machine would be two servers.
        families = {entry[0] for entry in entries}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        hosts = sorted(str(entry[4][0]) for entry in entries if entry[0] == family)
    shown = (f"[{each}]" if ":" in each else each for each in hosts)
    return [
        Target(each, port, f"{name}:{port}", host if is_tls else None)
        for each, name in zip(hosts, shown, strict=True)
    ]


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
