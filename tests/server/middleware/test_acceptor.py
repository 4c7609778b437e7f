"""The number of connections holds while TLS is still agreed upon."""

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from ropewalk.server.middleware.acceptor import Acceptor
from ropewalk.server.middleware.connections import (
    ConnectionLimits,
    LimitedProtocol,
    OpenConnections,
)

_LIMITS = ConnectionLimits(max_connections=2, head_timeout_s=20, send_timeout_s=20)


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server, and of a client that trusts it only."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-keyout", str(key), "-out", str(certificate)),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(certificate, key)
    return of_server, ssl.create_default_context(cafile=str(certificate))


async def longest_silent_are_closed(of_server: ssl.SSLContext, of_client: ssl.SSLContext) -> None:
    """Open two connections that never speak, and then one that asks."""
    config = uvicorn.Config(
        PlainTextResponse("served"),
        http=LimitedProtocol,
        lifespan="off",
        log_config=None,
        h11_max_incomplete_event_size=65536,
    )
    config.load()
    shared, state = OpenConnections(_LIMITS), ServerState()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        acceptor = Acceptor(
            listener,
            lambda: LimitedProtocol(config, state, {}, shared=shared),
            shared,
            of_server,
        )
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await silent[0][0].read() == b"", "the oldest made room for the third"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=of_client)
        assert await silent[1][0].read() == b"", "and the next for the one that asks"
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"served")
        for _, each in (*silent, (reader, writer)):
            each.close()
        acceptor.close()
        await acceptor.wait_closed()


def test_clients_that_do_not_finish_tls_make_room_for_others(tmp_path: Path) -> None:
    """They hold a descriptor, although no protocol has heard of them."""
    asyncio.run(asyncio.wait_for(longest_silent_are_closed(*contexts(tmp_path)), 30))
