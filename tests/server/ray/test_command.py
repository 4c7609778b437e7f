"""The command: what it says, who may reach the cluster, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.server.ray.cluster import (
    actors_of,
    is_alive,
    servers_of,
    streams,
    wait_for_replicas,
    wait_until,
)
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, command, running_server
from tests.servers.programs import free_port

pytestmark = pytest.mark.ray


def test_each_server_is_a_target_of_prometheus(fleet: Server) -> None:
    """The servers refuse others than the router, so it reads their pages."""
    wait_for_replicas(fleet, 2)
    before = samples_of(fleet)
    asyncio.run(streams(fleet, 8, 20))
    after = samples_of(fleet)
    name = "ropewalk_generated_tokens_total"
    assert total(after, name) - total(before, name) == 8 * 20
    assert len(httpx.get(f"{fleet.url}/metrics/servers", timeout=30).json()) == 2


def test_a_server_refuses_requests_that_do_not_come_through_the_router(fleet: Server) -> None:
    """On a cluster of this machine its port is on loopback."""
    wait_for_replicas(fleet, 2)
    (server, *_) = servers_of(fleet)
    for address, port in _listening(server):
        assert address == "0100007F", "only this machine reaches it"
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=30)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "router_not_trusted"
    through = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{fleet.url}/v1/completions", json=through, timeout=30).status_code == 200


def _listening(pid: int) -> set[tuple[str, int]]:
    """TCP addresses, as /proc has them, and ports that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                found.add((address, int(port, 16)))
    assert found
    return found


def test_sigterm_lets_streams_end_and_leaves_no_process() -> None:
    """New requests get 503 meanwhile, and the command ends with code 0."""
    with running_server("--replicas", "1", "--threads", "1") as server:
        processes = [*servers_of(server), *actors_of(server)]
        found: list[object] = []

        def read() -> None:
            found.extend(asyncio.run(streams(server, 4, 1200)))

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(1)
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.5)
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30)
        reader.join()
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "draining"
        assert all(each.error is None and each.num_tokens == 1200 for each in found)  # type: ignore[attr-defined]
    wait_until(lambda: not any(map(is_alive, processes)), 30)


def test_a_killed_command_leaves_no_process() -> None:
    """Ray's processes end with it, an actor with them, and a server with its actor."""
    with running_server("--replicas", "1", "--threads", "1") as server:
        processes = [*servers_of(server), *actors_of(server)]
        assert len(processes) >= 2
        os.kill(processes[0], signal.SIGSTOP)  # also one that can do nothing itself
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, processes)), 60)


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    """The server's error comes through Ray without its traceback, and the code is 2."""
    ended = subprocess.run(
        command("serve", "--port", "0", "--replicas", "1", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert str(tmp_path) in ended.stderr.splitlines()[-1]


def test_serve_run_serves_behind_rays_own_proxy() -> None:
    """For those who run Ray already: the application by its import path."""
    port = free_port()
    script = (
        "import sys, ray; from ray import serve; from ropewalk.server.ray_app import build\n"
        "ray.init(num_cpus=2, include_dashboard=False)\n"
        "serve.start(http_options={'host': '127.0.0.1', 'port': int(sys.argv[1])})\n"
        "serve.run(build({'replicas': '1', 'threads': '1'}), name='mine')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_worker_niceness": "0"},  # as the command has it
    )
    try:
        assert running.stdout is not None
        assert any(line.startswith("ready") for line in running.stdout)
        server = Server(f"http://127.0.0.1:{port}", "", running.pid, [])
        assert httpx.get(f"{server.url}/ready", timeout=30).json() == {"status": "ok"}
        answers = asyncio.run(streams(server, 4, 30))
        assert all(each.error is None and each.num_tokens == 30 for each in answers)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": 5}, timeout=30)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
    finally:
        running.communicate(timeout=60)
