"""`ropewalk chat` on a pseudo-terminal and in a pipe."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.servers.paced import MODULE, slowed
from tests.servers.processes import Server, command, running_server

_LIMIT_S = 150


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, master: int, process: "subprocess.Popen[bytes]") -> None:
        self._master = master
        self.process = process
        self._shown = ""

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._master, f"{text}\n".encode())

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._master, key)

    def drain(self) -> None:
        """Read until the command has ended; a full terminal would block its last write."""
        deadline = time.monotonic() + _LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self._master], [], [], 0.1)[0]:
                with suppress(OSError):  # Linux's answer once the command has closed its side
                    os.read(self._master, 65536)

    def until(self, pattern: str) -> str:
        """Return everything shown up to a match, without colours, and forget it."""
        deadline = time.monotonic() + _LIMIT_S
        while not (found := re.search(pattern, self._shown)):
            assert time.monotonic() < deadline, self._shown
            if select.select([self._master], [], [], 0.2)[0]:
                piece = os.read(self._master, 65536).decode(errors="replace")
                self._shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece).replace("\r", "")
        text, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return text


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """Run a command on a pseudo-terminal until the block ends."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=_take_terminal,  # noqa: PLW1509  # no thread runs here
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_conversation_by_commands(server: Server, tmp_path: Path) -> None:
    """Each answer ends with its numbers; /rope, /compare, /file and /stats do what they say."""
    (tmp_path / "notes.txt").write_text("x = 1\n" * 20)
    with terminal("chat", server.url, "--max-tokens", "5", "--temperature", "0") as shell:
        shell.until("> ")
        shell.type("hello")
        assert "1x default" in shell.until(r"tokens, .*ms/token\n")
        shell.type("/rope yarn 4")
        shell.until("rope: yarn 4\n")
        for typed, told in (
            ("/rope foo", r"no scaling of the type foo\. Allowed: .*yarn.*\n"),
            ("/compare foo", "no scaling of the type foo"),
            ("/rope yarn 0.5", "the factor must be a number of at least 1, got 0.5"),
            ("/rope yarn many", "the factor must be a number of at least 1, got many"),
        ):
            shell.type(typed)
            shell.until(told)
        shell.type("again")
        assert "4x yarn" in shell.until(r"tokens, .*ms/token\n")
        shell.type("/compare")
        assert "1x default" in shell.until(r"tokens, .*ms/token\n")
        shell.type(f"/file {tmp_path / 'notes.txt'}")
        shell.until("120 characters are in front")
        shell.type("/stats")
        shell.until("running, .* tokens generated")
        shell.type("/model none")
        shell.until("there is no model none. Served: ropewalk-demo")
        shell.type("/clear")
        shell.until("forgotten")
        shell.type("/compare")
        shell.until(r"no message to answer again yet\n[\s\S]*> ")  # before, the key would be lost
        shell.press(b"\x04")  # Ctrl-D
        shell.drain()
        assert shell.process.returncode == 0


def test_a_position_method_is_chosen_by_its_name() -> None:
    """It has no factor; `native` is the trained reading."""
    block = '{"rope_type": "default", "positions": {"method": "rerope"}}'
    flags = ("--rope-scaling", block, "--threads", "1", "--kv-cache-tokens", "4096")
    with (
        running_server(*flags, "--max-model-len", "1024") as server,
        terminal("chat", server.url, "--max-tokens", "5", "--temperature", "0") as shell,
    ):
        shell.until("> ")
        for typed, told in (
            ("/rope foo", r"Allowed: default; positions: .*native.*\n"),
            ("/rope rerope 2", "the position method rerope has no factor"),
            ("/rope rerope", "rope: rerope\n"),
        ):
            shell.type(typed)
            shell.until(told)
        shell.type("word " * 400)  # beyond the trained length, where the method reads
        assert "1x default, rerope" in shell.until(r"tokens, .*ms/token\n")
        shell.type("/rope native")
        shell.until("rope: native\n")
        shell.type("/clear")
        shell.until("forgotten")
        shell.type("hello")
        assert "rerope" not in shell.until(r"tokens, .*ms/token\n")


def test_ctrl_c_stops_an_answer_and_not_the_client() -> None:
    """The request ends in the server, and the next message is answered."""
    with (
        running_server("--threads", "1", module=MODULE) as server,
        terminal("chat", server.url, "--temperature", "0") as shell,
    ):
        shell.until("> ")
        with slowed(server.pid):
            shell.type("def f(")
            shell.until(r"def f\(\n[\s\S]")
            shell.press(b"\x03")  # Ctrl-C
            shell.until("stopped")
        wait_until(lambda: not httpx.get(f"{server.url}/stats").json()["requests_running"])
        shell.until("> ")
        shell.type("/help")
        shell.until("Ctrl-D leaves")


def _piped(url: str, text: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("chat", url, *flags),
        input=text,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--max-tokens", "5"), ""), ((), "ropewalk chat: ended by tier\n")],
    ids=["short", "fills its tier"],
)
def test_piped_input_is_one_message(server: Server, flags: tuple[str, ...], said: str) -> None:
    """Standard output has the answer's text only; an answer that fills its tier says so beside."""
    ran = _piped(server.url, "hello", "--temperature", "0", *flags)
    limit = {"max_tokens": 5} if flags else {}
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **limit}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert (ran.returncode, ran.stderr) == (0, said)
    assert ran.stdout == answer["choices"][0]["message"]["content"] + "\n"


@pytest.mark.parametrize(
    ("url", "text", "sentence"),
    [
        ("http://127.0.0.1:9", "hello", "no server answers at http://127.0.0.1:9: start one"),
        ("127.0.0.1:1", "hello", "the URL needs http:// or https:// in front, got 127.0.0.1:1"),
        (None, " ", "the input is empty"),
        (None, "word " * 5000, "maximum context length"),
    ],
)
def test_a_failure_is_a_sentence_and_code_1(
    server: Server, url: str | None, text: str, sentence: str
) -> None:
    """Nothing is on standard output."""
    ran = _piped(url or server.url, text)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.startswith("ropewalk chat: ")
    assert sentence in ran.stderr


def test_top_shows_the_numbers_of_the_chart(server: Server) -> None:
    """A row for each context with requests, refreshed on a terminal until Ctrl-C."""
    body = {"prompt": "x = 1\n", "max_tokens": 4}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    once = subprocess.run(
        command("top", server.url, "--once"),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    )
    assert re.search(r"<= 16 +\d+ +\d.* m?s", once.stdout)
    assert "since the server's start" in once.stdout
    with terminal("top", server.url, "--seconds", "0.2") as shell:
        shell.until("tokens/s")
        shell.until(r"last \d+ s")  # a loaded machine refreshes late
        os.killpg(shell.process.pid, signal.SIGINT)
        shell.drain()
        assert shell.process.returncode == 0
