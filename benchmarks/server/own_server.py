"""The port and the first answer of a server that a benchmark starts on this machine."""

import http.client
import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def completion_status(port: int, body: str, timeout_s: float) -> int | None:
    """Return the status of a completion; None if no server listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except OSError:
        return None
    finally:
        connection.close()
    return answer.status
