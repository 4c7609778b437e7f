"""`ropewalk serve --kv-disk`: prompts survive a restart, and servers share a folder."""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropewalk.model_runtime.engine.kv_disk.counts import StoreCounts
from ropewalk.server.disk_metrics import DiskMetrics
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.gate import checked
from ropewalk.server.startup.planning.banner_lines import describe
from ropewalk.server.startup.planning.serving_plan import plan_serving
from tests.doubles.planned import model_facts
from tests.doubles.waiting import wait_until
from tests.servers.processes import Server, run_here, running_server, without_replicas
from tests.servers.progress import say

pytestmark = without_replicas

SECONDS = float(os.environ.get("KV_DISK_SECONDS", "120"))  # of load and kills
PAGE_BYTES = 64 * 4096 + 128  # of the embedded model
SMALLEST_GIB = str(32 * PAGE_BYTES / 2**30)


def ask(url: str, prompt: list[int], **options: Any) -> tuple[Any, int]:
    """An answer's choice with its logprobs, and the tokens found in the cache."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3, **options}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def metrics(url: str) -> dict[str, float]:
    """The store's samples by name and label."""
    lines = httpx.get(f"{url}/metrics", timeout=120).text.splitlines()
    return {
        line.rpartition(" ")[0].removeprefix("ropewalk_kv_disk_"): float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("ropewalk_kv_disk_")
    }


@contextmanager
def storing_server(*flags: str) -> Iterator[Server]:
    """A server whose folder or store is open."""
    with running_server(*flags) as server:
        wait_until(lambda: any("kv_disk_open" in line for line in server.log))
        yield server


def disk_server(folder: Path, gib: str = "1", *flags: str) -> AbstractContextManager[Server]:
    return storing_server("--kv-disk", str(folder), "--kv-disk-gib", gib, *flags)


def test_a_prompt_survives_a_restart(server: Server, tmp_path: Path) -> None:
    """The answer is that of a server without a disk; metrics, banner and command tell of it."""
    folder = tmp_path / "kv"
    prompt = [(at * at) % 2000 for at in range(400)]
    expected, _ = ask(server.url, prompt)
    with disk_server(folder) as first:
        assert f"    on disk        1 GiB in {folder}, 4 KiB a token" in first.banner
        assert ask(first.url, prompt) == (expected, 0)
    with disk_server(folder) as second:
        assert ask(second.url, prompt) == (expected, 384)
        assert ask(second.url, prompt, cache_salt="other") == (expected, 0)
        told = metrics(second.url)
        stats = httpx.get(f"{second.url}/stats").json()["kv_disk"]
        top = run_here("top", second.url, "--once").stdout.splitlines()
    assert (stats["pages_read"], stats["tokens_read"], stats["bad_files"]) == (6, 384, 0)
    assert stats["bytes"] >= 6 * PAGE_BYTES
    assert not stats["paused"]
    assert re.fullmatch(
        r"disk 0\.\d+ GiB, 384 tokens read, \d pages written, 0 dropped, 0 bad files", top[1]
    )
    assert told['pages_total{event="read"}'] == 6
    assert told["tokens_read_total"] == 384
    assert told['seconds_total{way="read"}'] > 0
    assert told["bytes"] >= 6 * PAGE_BYTES
    assert told["paused"] == 0
    shown = run_here("cache", "stats", str(folder))
    assert shown.stdout.splitlines()[-1].split() == ["all", "12", "3", "MiB"]
    assert run_here("cache", "clear", str(folder)).stdout == "deleted 12 pages, 3 MiB\n"
    assert not list(folder.glob("v1/*/*/*"))


def folder_bytes(folder: Path) -> int:
    """The size of all files that were there during a look; others come and go meanwhile."""
    found: list[dict[Path, int]] = []
    for _ in range(2):
        found.append({})
        for path in folder.glob("v1/*/*/*"):
            with suppress(FileNotFoundError):
                found[-1][path] = path.stat().st_size
    first, second = found
    return sum(size for path, size in first.items() if path in second)


def test_a_folder_that_others_can_read_is_refused_before_anything_is_imported(
    tmp_path: Path,
) -> None:
    """The checks make no folder, and refuse one of the wrong mode: it holds prompts."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    flags = {"kv_disk": str(shared), "kv_disk_gib": "1"}
    with pytest.raises(SettingsError, match=r"kv_disk must have the mode 0700, .* has 0755"):
        checked(load_settings(flags))
    flags["kv_disk"] = str(tmp_path / "absent" / "kv")
    checked(load_settings(flags))
    assert not (tmp_path / "absent").exists()


def test_a_gpu_and_layers_with_states_are_refused(embedded: Any, tmp_path: Path) -> None:
    """The plan knows both before weights are read."""
    settings = load_settings({"kv_disk": str(tmp_path), "kv_disk_gib": "1"})
    facts = model_facts(settings, embedded.native)
    with pytest.raises(SettingsError, match="kv_disk needs the model on a CPU"):
        plan_serving(settings, replace(facts, gpu_bytes=2**30))
    with pytest.raises(SettingsError, match=r"kv_offload_gib is for a GPU: .*, got 2"):
        plan_serving(load_settings({"kv_offload_gib": "2"}), facts)
    hybrid = model_facts(settings, embedded.native, slot_bytes=1024)
    with pytest.raises(SettingsError, match="layers that keep a state"):
        plan_serving(settings, hybrid)


def test_host_memory_of_a_gpu_is_planned_and_told(embedded: Any, tmp_path: Path) -> None:
    """Alone, or before a folder."""
    beside = {"kv_disk": str(tmp_path), "kv_disk_gib": "1"}
    for flags in ({}, beside):
        settings = load_settings({"kv_offload_gib": "2", "kv_cache_tokens": "1024", **flags})
        facts = model_facts(settings, embedded.native, gpu_bytes=2**30)
        lines = describe(plan_serving(settings, facts))
        assert "    in host memory 2 GiB, 1 KiB a token" in lines
        assert ("on disk" in "".join(lines)) == bool(flags)


def test_metrics_of_host_memory_exist_with_it_only() -> None:
    """Without a folder or a store there is no size of one."""
    counts = StoreCounts(num_bytes=7, num_memory_bytes=500, place="at random")
    counts.memory["read"] = 3
    for has_memory in (False, True):
        factory = MetricFactory()
        metrics = DiskMetrics(factory, has_place=not has_memory, has_memory=has_memory)
        metrics.add(counts)
        found = factory.registry.get_sample_value
        assert found("ropewalk_kv_disk_bytes") == (None if has_memory else 7)
        info = found("ropewalk_kv_disk_info", {"place": "at random"})
        assert info == (None if has_memory else 1)  # no other server shares its pages
        assert found("ropewalk_kv_offload_bytes") == (500 if has_memory else None)
        read = found("ropewalk_kv_offload_pages_total", {"event": "read"})
        assert read == (3 if has_memory else None)


class Load:
    """Clients that ask two servers for prompts in several ways, and check every answer.

    A server may be killed at any time. Only its own requests may fail then.
    """

    def __init__(self, prompts: list[list[int]], expected: list[Any], seed: int) -> None:
        self._prompts, self._expected, self._seed = prompts, expected, seed
        self.urls: list[str] = []  # of the servers that live
        self.killed: set[str] = set()
        self.is_over = threading.Event()
        self.num_served = self.num_cut = 0
        self.wrong: list[Any] = []

    def run(self, number: int) -> None:
        """Be one client until the end."""
        draw = random.Random(self._seed + number)
        while not self.is_over.is_set():
            url, at = draw.choice(self.urls), draw.randrange(len(self._prompts))
            try:
                self._ask(url, at, draw.randrange(4))
                self.num_served += 1
            except httpx.TransportError as error:
                self.num_cut += 1
                if url not in self.killed:
                    self.wrong.append(error)
            except (AssertionError, LookupError, ValueError) as error:
                self.wrong.append(error)

    def _ask(self, url: str, at: int, way: int) -> None:
        prompt, expected = self._prompts[at], self._expected[at]
        if way < 2:
            options = {"cache_salt": "other"} if way else {}
            found: Any = ask(url, prompt, **options)[0]
        else:
            expected = expected["text"]
            found = streamed(url, prompt, leaves=way == 3)
            expected = expected[: len(found)] if way == 3 else expected
        if found != expected:
            self.wrong.append((at, way, found, expected))


def streamed(url: str, prompt: list[int], *, leaves: bool) -> str:
    """The text of a stream; `leaves`: of its first event, after which the client is gone."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if leaves:
                break
    return text


class Pair:
    """Two servers on one folder whose cap is always full, and the clients' load of them."""

    def __init__(self, folder: Path, load: Load) -> None:
        self.logs: list[list[str]] = []
        self.num_kills = 0
        self._folder, self._load = folder, load
        self._stacks = [ExitStack(), ExitStack()]
        self._started: dict[int, Server] = {}
        # The metrics of killed servers by place; a Counter adds floats, too.
        self._ended: list[Counter[str]] = [Counter(), Counter()]
        for place in range(2):
            self._start(place)

    def _start(self, place: int) -> None:
        self._stacks[place] = ExitStack()
        server = disk_server(self._folder, SMALLEST_GIB, "--kv-cache-tokens", "2048")
        self._started[place] = self._stacks[place].enter_context(server)
        self.logs.append(self._started[place].log)
        self._load.urls = [each.url for each in self._started.values()]

    def kill(self, place: int) -> None:
        """Kill the server at a place, and start another one there."""
        server = self._started[place]
        self._ended[place].update(metrics(server.url))
        self._load.killed.add(server.url)
        os.kill(server.pid, signal.SIGKILL)
        # By place: after many starts, a server gets the port of one that was killed.
        self._load.urls = [each.url for at, each in self._started.items() if at != place]
        self._stacks[place].close()
        self._start(place)
        self.num_kills += 1

    def told(self) -> list[Counter[str]]:
        """The metrics of all servers so far, by place."""
        return [
            self._ended[place] + Counter(metrics(each.url)) for place, each in self._started.items()
        ]

    def is_used(self) -> bool:
        """Whether servers of both places have read pages, and pages were evicted."""
        read, evicted = ('pages_total{event="read"}', 'pages_total{event="evicted"}')
        found = self.told()
        return all(each[read] for each in found) and any(each[evicted] for each in found)

    def close(self) -> None:
        """End both."""
        for each in self._stacks:
            each.close()


_KILLS = (pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(SECONDS + 300))


@pytest.mark.parametrize(
    ("seconds", "least_kills"),
    [(0.0, 0), pytest.param(SECONDS, 4, marks=_KILLS)],
    ids=["alive", "killed"],
)
def test_servers_on_a_folder_that_is_always_full_cost_no_answer_and_no_bit(
    server: Server, tmp_path: Path, seconds: float, least_kills: int
) -> None:
    """Each finds what the other wrote; with kills, one ends every few seconds."""
    folder = tmp_path / "kv"
    draw = random.Random(7)
    prompts = [[draw.randrange(2000) for _ in range(draw.randrange(70, 700))] for _ in range(24)]
    load = Load(prompts, [ask(server.url, each)[0] for each in prompts], seed=11)
    pair, most = Pair(folder, load), 0
    clients = [threading.Thread(target=load.run, args=(number,)) for number in range(5)]
    try:
        for each in clients:
            each.start()
        ends = time.monotonic() + seconds
        # On a busy machine, a start takes long. The load goes on until enough has happened.
        while (
            time.monotonic() < ends
            or pair.num_kills < least_kills
            or (least_kills and (load.num_served < 100 or not load.num_cut))
            or not pair.is_used()
            or most <= 20 * PAGE_BYTES
        ):
            assert load.wrong == []
            lives = time.monotonic() + (draw.uniform(0.5, 4) if least_kills else 0.5)
            while time.monotonic() < lives:
                most = max(most, folder_bytes(folder))
            if least_kills:
                pair.kill(draw.randrange(2))
        load.is_over.set()
        for each in clients:
            each.join()
        told = sum(pair.told(), Counter())
    finally:
        load.is_over.set()
        pair.close()
    say(f"{load.num_served} answers, {load.num_cut} cut, {most} bytes at most; {dict(told)}")
    assert load.wrong == []
    assert most <= 34 * PAGE_BYTES
    bad = {name: value for name, value in told.items() if "bad" in name}
    assert not any(value for name, value in bad.items() if "slow" not in name)
    assert not [line for log in pair.logs for line in log if "Traceback" in line]
