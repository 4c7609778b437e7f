"""Looks into a running cluster: the processes of its servers, and streams of many clients."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server

_READY_S = 120


def servers_of(edge: Server) -> list[int]:
    """Pids of the servers behind a router, in order."""
    module = "ropewalk.server.ray.server_process"
    found = (pid for pid in _descendants(edge.pid) if module in _text(pid, "cmdline").split("\0"))
    return sorted(found)


def actors_of(edge: Server) -> list[int]:
    """Pids of the actors that have started them."""
    title = "ray::ServeReplica:ropewalk:Server"
    return [pid for pid in _descendants(edge.pid) if title in _text(pid, "cmdline")]


def _descendants(pid: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _text(int(entry.name), "stat")):
            parent = int(stat.rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        yield from children
        waiting += children


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent for ever."""
    state = _text(pid, "stat").rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def wait_until(condition: Callable[[], bool], limit_s: float = _READY_S) -> None:
    """Wait for a condition. Raises AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.2)


def wait_for_replicas(server: Server, number: int) -> None:
    """Wait until so many replicas take requests."""

    def is_so() -> bool:
        try:
            samples = samples_of(server)
            return total(samples, "ropewalk_router_servers", state="ready") == number
        except (httpx.HTTPError, ValueError):
            return False

    wait_until(is_so)


@dataclass
class Answer:
    """One stream as its client saw it."""

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_done: int = 0  # `[DONE]` events
    num_tokens: int = 0  # by the usage at the end


def body(index: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Request number `index`: another prompt, seed and temperature for each."""
    return {
        "prompt": f"def function_{index}(self, ",
        "max_tokens": max_tokens,
        "seed": index,
        "temperature": 0.9 if index % 2 else 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


async def stream(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> Answer:
    """Read one stream to its end."""
    answer = Answer()
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code} {(await response.aread()).decode()}"
            return answer
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.num_done += 1
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = str(event["error"])
                    continue
                for choice in event["choices"]:
                    answer.text += choice["text"]
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                if event.get("usage"):
                    answer.num_tokens = event["usage"]["completion_tokens"]
    return answer


async def streams(
    server: Server,
    number: int,
    max_tokens: int,
    disturb: Callable[[], None] | None = None,
    after_s: float = 0.5,
) -> list[Answer]:
    """Answers of `number` clients at once; `disturb` is called while they read."""
    limits = httpx.Limits(max_connections=number)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        tasks = [
            asyncio.ensure_future(stream(client, server.url, body(index, max_tokens)))
            for index in range(number)
        ]
        if disturb is not None:
            await asyncio.sleep(after_s)
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)
