"""A real nginx on this machine, over docker/nginx.conf with other addresses; always ended."""

import os
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.docker.files import DOCKER
from tests.doubles.waiting import wait_until
from tests.servers.processes import end
from tests.servers.programs import free_port, program

_STOP_S = 20
# Debian's and the image's own nginx.conf include files of /etc/nginx/conf.d in the same place.
_MAIN = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 512; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    log_format tried "$request_method $uri $status [$upstream_status] $sent_http_x_request_id";
    access_log {folder}/access.log tried;
    include {folder}/ropewalk.conf;
}}
"""


@dataclass(frozen=True)
class Nginx:
    """The address of a running nginx, and its logs."""

    url: str
    folder: Path

    def tried(self) -> list[str]:
        """The statuses of the servers that each request was tried on, such as `503, 200`."""
        return re.findall(r"\[(.*)\]", (self.folder / "access.log").read_text())


def binary() -> str:
    return program("nginx", package="nginx-light")


def configured(text: str, listen: str, servers: Sequence[str]) -> str:
    """docker/nginx.conf but for its three addresses."""
    changed, num_listens = re.subn(r"(?<=\blisten )8080", listen, text)
    names = re.findall(r"\bserver (server-\d:8000)", text)
    assert (num_listens, len(names)) == (1, len(servers))
    for name, address in zip(names, servers, strict=True):
        changed = changed.replace(f"server {name}", f"server {address}")
    return changed


@contextmanager
def running_nginx(folder: Path, *urls: str) -> Iterator[Nginx]:
    """Run nginx before the servers at `urls` until the block ends; its files go to `folder`."""
    listen = f"127.0.0.1:{free_port()}"
    text = (DOCKER / "nginx.conf").read_text()
    servers = [url.removeprefix("http://") for url in urls]
    (folder / "ropewalk.conf").write_text(configured(text, listen, servers))
    # Root's workers would become another user, who cannot read a test's folder.
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "main.conf").write_text(_MAIN.format(folder=folder, user=user))
    log = folder / "error.log"
    command = [binary(), "-p", str(folder), "-e", str(log), "-c", str(folder / "main.conf")]
    process = subprocess.Popen(command)

    def is_listening() -> bool:
        assert process.poll() is None, log.read_text()
        host, port = listen.split(":")
        with socket.socket() as client:
            return client.connect_ex((host, int(port))) == 0

    try:
        wait_until(is_listening, "listening")
        yield Nginx(f"http://{listen}", folder)
    finally:
        end(process, _STOP_S)  # the master, which ends its workers
