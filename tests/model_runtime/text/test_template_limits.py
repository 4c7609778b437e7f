"""Templates that take what they can get: each costs its own chat, and no other."""

import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ropewalk.model_runtime.errors import ModelError, RequestError, TemplateLimitError
from ropewalk.model_runtime.text import template_processes
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.tools.find_format import find_formats
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.processes import children_of

HELLO = [{"role": "user", "content": "Hello."}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SECONDS = 0.2
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
# A template, and what its refusal says.
WHEN_RENDERED = {
    "a loop": (LOOP, r"takes more than 0.2 seconds of processor time \(chat_template_seconds\)"),
    "a large product": ("{{ messages[0].content * 10**10 }}", "takes more than 64 MiB of memory"),
    "a large constant": ("{{ 'x' * 10**10 }}", "takes more than 64 MiB of memory"),
    "a large width": ("{{ '%10000000000d' % messages | length }}", "takes more than 64 MiB"),
    "a text that doubles": (
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "takes more than 64 MiB of memory",
    ),
    "a long text": ("{{ messages[0].content * 200000 }}", r"writes more than 1,0[45]\d,\d{3} char"),
}
WHEN_COMPILED = {
    "a power": ("{{ 7 ** 10000000 }}", "takes more than 0.2 seconds of processor time"),
    "depth": ("{{ " + "not " * 3000 + "1 }}", "cannot be compiled: RecursionError"),
    "digits": ("{{ (10 ** 5000) | filesizeformat }}", "cannot be compiled: ValueError"),
}


def template(text: str, seconds: float = SECONDS) -> ChatTemplate:
    """The template over a tokenizer of bytes."""
    return ChatTemplate(text, byte_tokenizer_fast().special_tokens_map, seconds)


@pytest.mark.sampled
@pytest.mark.parametrize("name", WHEN_RENDERED)
def test_a_template_that_exceeds_its_limits_is_refused(name: str) -> None:
    """The chat gets a sentence, a start another one; the next chat is rendered."""
    text, problem = WHEN_RENDERED[name]
    hostile, plain = template(text), template(PLAIN)
    with pytest.raises(TemplateLimitError, match=f"^`messages`: .* template {problem}") as raised:
        hostile.render(HELLO)
    assert raised.value.param == "messages"
    with pytest.raises(ModelError, match=f"^the chat template {problem}.* on a short conversation"):
        find_formats(hostile, {})
    assert plain.render(HELLO) == "Hello."


@pytest.mark.parametrize("name", WHEN_COMPILED)
def test_a_template_that_cannot_be_compiled_is_refused_at_start(name: str) -> None:
    """Jinja computes constants while it compiles."""
    text, problem = WHEN_COMPILED[name]
    with pytest.raises(ModelError, match=f"^the chat template {problem}"):
        template(text)


def test_a_branch_that_is_never_taken_costs_nothing() -> None:
    """Jinja computes its constant all the same, and goes on when it gets no memory."""
    assert template("a{% if false %}{{ 'x' * 3000000000 }}{% endif %}b").render(HELLO) == "ab"


def test_a_long_chat_has_more_room() -> None:
    """Memory and output grow with the request; characters of four bytes are the worst case."""
    text = "\N{GRINNING FACE}" * 1_500_000
    doubled = "{% for m in messages %}{{ m.content | trim }}{{ '!' + m.content }}{% endfor %}"
    assert template(doubled, 30).render([{"role": "user", "content": text}]) == f"{text}!{text}"


def test_a_long_chat_after_a_short_one_has_room_before_it_is_read() -> None:
    """Its content alone is more than the limit of the short one."""
    short = template("{{ messages | length }}", 30)
    long = [{"role": "user", "content": "x" * 100 * 2**20}]
    assert [short.render(each) for each in (HELLO, long, HELLO)] == ["1"] * 3


@needs_proc
def test_the_processes_inherit_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's template is code of strangers, so the environment holds no key."""
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


@pytest.mark.costly
def test_many_that_loop_hold_up_no_other() -> None:
    """Seven loop at once, and one more chat has its own process meanwhile."""
    looping, plain = template(LOOP, 0.4), template(PLAIN)
    hostile = [looping.submit(HELLO) for _ in range(7)]
    assert plain.submit(HELLO).result(timeout=60) == "Hello."
    assert not all(each.done() for each in hostile)
    wait(hostile)
    assert {type(each.exception()) for each in hostile} == {TemplateLimitError}


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


def test_a_process_that_dies_before_its_next_chat_costs_no_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed process counts as alive until the kernel has taken it down."""
    plain = template(PLAIN)
    kill_all()
    # Here that moment never ends.
    monkeypatch.setattr(template_processes._TemplateProcess, "is_alive", True)
    assert plain.render(HELLO) == "Hello."
    template_processes.template_processes().close()  # another killed one may be left


@contextmanager
def no_more_processes() -> Iterator[None]:
    """A machine without room for another process."""

    def none_left(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess, "Popen", none_left)
        yield


def test_a_burst_of_chats_waits_for_a_process_instead_of_starting_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Starting one takes longer than many renderings."""
    monkeypatch.setattr(template_processes, "_PATIENCE_S", 60)  # on a machine with much else to do
    plain = template(PLAIN)
    with no_more_processes():
        burst = [plain.submit(HELLO) for _ in range(16)]
        assert {each.result(timeout=60) for each in burst} == {"Hello."}


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
    ChatTemplate(text, seconds=2.0).submit(hello)
time.sleep(1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.costly
@needs_proc
def test_the_processes_end_with_the_server() -> None:
    """Also if it is killed while one of them loops."""
    root = str(Path(__file__).resolve().parents[3])
    program = [sys.executable, "-c", _PROGRAM, root, LOOP, PLAIN]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        left = children(server.pid)
        assert len(left) == 2  # one loops still, or has been replaced
        server.kill()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [each for each in left if Path(f"/proc/{each}").exists()]


@needs_proc
def test_no_process_is_no_crash() -> None:
    """A machine without room for another process refuses the chat in a sentence."""
    plain = template(PLAIN)
    kill_all()
    refused = pytest.raises(RequestError, match="failed on them: no process for it can be started")
    with no_more_processes(), refused:
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
