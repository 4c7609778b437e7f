"""A real Prometheus on this machine: started over a copy of our configuration, always ended."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.docker.files import DOCKER
from tests.doubles.waiting import wait_until
from tests.servers.processes import end
from tests.servers.programs import free_port, program

_STOP_S = 20


def tool(name: str) -> str:
    return program(name, package="prometheus")


@dataclass(frozen=True)
class Prometheus:
    """The HTTP interface of a running Prometheus."""

    url: str

    def api(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer; an error is an error here."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def now(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """An instant query: (labels, value) of each series."""
        found = self.api("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def over(self, expression: str, seconds: float) -> list[tuple[dict[str, str], list[float]]]:
        """A range query that ends now: (labels, values) of each series."""
        end = time.time()
        found = self.api("query_range", query=expression, start=end - seconds, end=end, step=2)
        return [
            (each["metric"], [float(value) for _, value in each["values"]])
            for each in found["result"]
        ]


def _configuration(target: str, folder: Path) -> Path:
    """docker/prometheus.yml but for the target's address and the intervals, which are shorter."""
    configuration = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    short = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "1s")
    assert set(short) == set(configuration["global"])
    configuration["global"] = short
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    shutil.copy(DOCKER / "alerts.yml", folder)
    return path


@contextmanager
def running_prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Scrape host:port `target` until the block ends; data and log go to `folder`."""
    binary = tool("prometheus")
    address = f"127.0.0.1:{free_port()}"
    log = folder / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={_configuration(target, folder)}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        prometheus = Prometheus(f"http://{address}")

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{prometheus.url}/-/ready").is_success
            except httpx.TransportError:
                return False

        wait_until(is_ready, "ready")
        yield prometheus
    finally:
        end(process, _STOP_S)
