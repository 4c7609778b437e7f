"""Templates that take too long: each costs its own chat, and no other."""

import enum
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ropewalk.model_runtime.errors import ModelError, RequestError, TemplateLimitError
from ropewalk.model_runtime.text import template_renderer
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.tools.find_format import find_formats
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.processes import children_of

HELLO = [{"role": "user", "content": "Hello."}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
EXCESS = "takes more than 0.2 seconds of processor time"
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait for the real limit."""
    monkeypatch.setattr(template_renderer, "SECONDS", 0.2)


def template(text: str) -> ChatTemplate:
    """The template over a tokenizer of bytes."""
    return ChatTemplate(text, byte_tokenizer_fast().special_tokens_map)


def test_a_template_that_exceeds_its_time_is_refused() -> None:
    """The chat gets a sentence, a start another one; the next chat is rendered."""
    slow, plain = template(LOOP), template(PLAIN)
    with pytest.raises(TemplateLimitError, match=f"^`messages`: .* template {EXCESS}") as raised:
        slow.render(HELLO)
    assert raised.value.param == "messages"
    with pytest.raises(ModelError, match=f"^the chat template {EXCESS} on a short conversation"):
        find_formats(slow, {})
    assert plain.render(HELLO) == "Hello."


def test_a_template_that_cannot_be_compiled_is_refused_at_start() -> None:
    with pytest.raises(ModelError, match=r"^the chat template cannot be compiled: RecursionError"):
        template("{{ " + "not " * 3000 + "1 }}")


def test_a_long_chat_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters of four bytes are the worst case."""
    monkeypatch.setattr(template_renderer, "SECONDS", 30)
    text = "\N{GRINNING FACE}" * 1_500_000
    doubled = "{% for m in messages %}{{ m.content | trim }}{{ '!' + m.content }}{% endfor %}"
    assert template(doubled).render([{"role": "user", "content": text}]) == f"{text}!{text}"


@needs_proc
def test_the_processes_inherit_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need none, and a crash of one may be written down."""
    monkeypatch.setenv("ROPEWALK_API_KEY", "secret-a")
    kill_all()
    assert template(PLAIN).render(HELLO) == "Hello."
    for each in children(os.getpid()):
        environment = Path(f"/proc/{each}/environ").read_bytes()
        assert b"PATH=" in environment
        assert b"secret-a" not in environment


def test_values_of_a_subclass_are_plain_in_a_template() -> None:
    """They have no methods that the sandbox does not know."""

    class Role(enum.StrEnum):
        USER = "user"

    message = {"role": Role.USER, "content": "{{ 1 }}"}
    assert template("{{ messages[0].role }}{{ messages }}").render([message]) == (
        "user[{'role': 'user', 'content': '{{ 1 }}'}]"
    )


def test_a_chat_behind_slow_ones_is_rendered() -> None:
    """It waits for the time of each."""
    slow, plain = template(LOOP), template(PLAIN)
    before = [slow.submit(HELLO) for _ in range(3)]
    assert plain.submit(HELLO).result(timeout=60) == "Hello."
    assert {type(each.exception()) for each in before} == {TemplateLimitError}


def children(pid: int) -> set[int]:
    """The template processes of a process."""
    return set(children_of(pid, "ropewalk.model_runtime.text.template_process"))


def kill_all() -> set[int]:
    """Kill the template processes of this one, and wait for their ends."""
    killed = children(os.getpid())
    for each in killed:
        os.kill(each, signal.SIGKILL)
    while children(os.getpid()) & killed:
        time.sleep(0.01)
    return killed


@needs_proc
def test_a_process_that_was_killed_is_replaced() -> None:
    """The kernel may kill it, for example when memory runs out."""
    plain = template(PLAIN)
    killed = kill_all()
    assert killed
    assert plain.render(HELLO) == "Hello."
    assert children(os.getpid()).isdisjoint(killed)


@needs_proc
def test_an_interrupt_of_the_group_leaves_the_processes_alone() -> None:
    """Control and C, and the end of a container, reach all; the server still answers chats."""
    plain = template(PLAIN)
    before = children(os.getpid())
    for each in before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(each, number)
    assert plain.render(HELLO) == "Hello."
    assert before <= children(os.getpid())


_PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ropewalk.model_runtime.text.chat_template import ChatTemplate
hello = [{"role": "user", "content": "Hello."}]
for text in sys.argv[2:]:
    ChatTemplate(text).submit(hello)
time.sleep(0.5)
print("ready", flush=True)
time.sleep(600)
"""


@needs_proc
def test_the_processes_end_with_the_server() -> None:
    """Also if it is killed while a template loops."""
    root = str(Path(__file__).resolve().parents[3])
    program = [sys.executable, "-c", _PROGRAM, root, LOOP, PLAIN]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        left = children(server.pid)
        assert len(left) == 1
        server.kill()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [each for each in left if Path(f"/proc/{each}").exists()]


@needs_proc
def test_no_process_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without room for another process refuses the chat in a sentence."""
    plain = template(PLAIN)
    kill_all()

    def none_left(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", none_left)
        with pytest.raises(RequestError, match="failed on them: no process for it can be started"):
            plain.render(HELLO)
    assert plain.render(HELLO) == "Hello."


def test_threads_share_the_processes() -> None:
    """Each gets the text of its own template and messages."""
    templates = [template("{{ bos_token }}" * at + PLAIN) for at in range(4)]
    problems = list[str]()

    def render(at: int) -> None:
        for turn in range(25):
            text = templates[at].render([{"role": "user", "content": f"{at} {turn}"}])
            if text != f"{at} {turn}":
                problems.append(text)

    threads = [threading.Thread(target=render, args=(at,)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not problems
