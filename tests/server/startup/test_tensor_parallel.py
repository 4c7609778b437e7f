"""`serve --tensor-parallel-size 2` as a process: its answers, and the ends of its two ranks."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.server.startup.test_lifecycle import ENDLESS, LONG, process, stream, wait_until_streaming
from tests.servers.processes import Server, children_of, run_here

RANKS = ("--tensor-parallel-size", "2", "--threads", "1")
_FOLLOWER = "ropewalk.model_runtime.parallel.follower"
_MOST_S = 60.0  # until the other ranks have ended; a loaded machine takes seconds
REQUESTS = [
    {
        "prompt": [*range(5, 25), number],
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": number % 3 / 2,
        "seed": number,
        "logprobs": 2,
    }
    for number in range(9)
]


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    """Wait until none of the processes runs."""
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), limit_s=limit_s)


def answers(url: str) -> list[Any]:
    """The choices of all requests, sent at the same time."""

    def ask(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=90)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(ask, REQUESTS))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of temporary files of the processes that a test starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def kept(temporary: Path) -> list[str]:
    """The names of our own temporary files and folders."""
    return [each.name for each in temporary.glob("ropewalk-*")]


def test_two_ranks_answer_as_one_and_end_together(
    server: Server, tmp_path: Path, temporary: Path
) -> None:
    """Seeded answers are the same; a lost follower ends the process, also while rank 0 waits.

    Nothing lies in a folder meanwhile, so `kill -9` leaves nothing behind.
    """
    with process(tmp_path, *RANKS) as started:
        started.wait_for("listening on")
        banner = started.wait_for(r"tensor parallel +2 ranks, (.*); each has")[1]
        found, expected = answers(started.url), answers(server.url)
        if banner == "same bits as one":
            assert found == expected
        else:
            assert banner == "within rounding"
        assert not kept(temporary)
        (follower,) = children_of(started.process.pid, _FOLLOWER)
        lines: list[str] = []
        reading = stream(started.url, ENDLESS, lines)
        wait_until_streaming(lines)
        os.kill(follower, signal.SIGSTOP)  # rank 0 now waits for it within a step
        time.sleep(0.5)
        os.kill(follower, signal.SIGKILL)
        assert started.process.wait(_MOST_S) == 1
        reading.join(_MOST_S)
        assert lines[-1] == "data: [DONE]"
        assert "The request failed: the engine stopped." in lines[-2]
        assert "engine_died" in started.log()
        assert not kept(temporary)


@pytest.mark.long
def test_followers_end_with_the_first_rank(tmp_path: Path, temporary: Path) -> None:
    """A killed server leaves no process or file behind, although its followers were in a step."""
    with process(tmp_path, *RANKS) as started:
        started.wait_for("listening on")
        followers = children_of(started.process.pid, _FOLLOWER)
        assert len(followers) == 1
        lines: list[str] = []
        reading = stream(started.url, ENDLESS, lines)
        wait_until_streaming(lines)
        started.process.kill()
        wait_until_gone(followers, _MOST_S)
        assert not kept(temporary)
        reading.join(_MOST_S)


@pytest.mark.long
def test_a_signal_to_all_ranks_drains(tmp_path: Path) -> None:
    """A service manager signals every process, and the answer under way is still finished."""
    with process(tmp_path, *RANKS) as started:
        started.wait_for("listening on")
        followers = children_of(started.process.pid, _FOLLOWER)
        lines: list[str] = []
        reading = stream(started.url, {**LONG, "max_tokens": 300}, lines)
        wait_until_streaming(lines)
        for pid in (*followers, started.process.pid):
            os.kill(pid, signal.SIGTERM)
        reading.join(90)
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2] or '"finish_reason":"length"' in lines[-3]
        assert started.process.wait(20) == 0
        wait_until_gone(followers, _MOST_S)


def test_config_check_shows_a_rank_and_refuses_what_does_not_divide(tmp_path: Path) -> None:
    """The memory of one rank, or a sentence with field, limit and value."""
    file = tmp_path / "settings.yaml"
    file.write_text("tensor_parallel_size: 2\nkv_cache_tokens: 4096\n")
    told = run_here("config", "check", str(file))
    assert told.returncode == 0
    assert "tensor parallel  2 ranks, bits found at load; each has 8.63 MiB" in told.stdout
    assert "KV cache         4096 tokens, 16 MiB" in told.stdout
    assert "of weights and 8 MiB of cache" in told.stdout
    file.write_text("tensor_parallel_size: 4\n")
    refused = run_here("config", "check", str(file))
    assert refused.returncode == 2
    assert "has num_key_value_heads 2, which is no multiple of 4" in refused.stderr
