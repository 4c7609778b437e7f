"""The yardstick over servers: its measurements, its refusals, and how it resumes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks.serving import main
from tests.servers.processes import Server
from tests.servers.sse_server import DONE, Script, SseServer, data, serving, token

# The scripted server answers with eight tokens to a prompt of 2,048, as `prefill-2048` asks.
PROMPT, OUTPUT = 2048, 8


def usage(num_prompt: int = PROMPT, num_output: int = OUTPUT, **details: Any) -> str:
    """The event with the token counts."""
    return data(
        choices=[],
        usage={"prompt_tokens": num_prompt, "completion_tokens": num_output, **details},
    )


def answer(num_events: int = OUTPUT, counted: str | None = None, delay_s: float = 0.002) -> Script:
    """A stream of so many tokens."""
    return [*[(delay_s, token())] * num_events, (0, counted or usage()), (0, DONE)]


def run(path: Path, *arguments: str) -> Result:
    """Run the command in this process."""
    ended = CliRunner().invoke(main, ["--record", str(path), *arguments])
    assert isinstance(ended.exception, SystemExit | None)  # a bug would look like code 1
    return ended


def rows(path: Path) -> list[dict[str, Any]]:
    """The record's lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.costly
def test_our_own_server_under_every_scenario_that_fits(server: Server, tmp_path: Path) -> None:
    """One server has two names, and neither finds its prompts in the other's cache."""
    path = tmp_path / "rounds.jsonl"
    chosen = "batch,prefill,prefix,mixed,context-256,context-2048"
    ended = run(
        path, f"a={server.url}", f"b={server.url}/v1", "--vocab-size", "2048", "--rounds", "1",
        "--warmup", "0", "--scenarios", chosen, "--markdown",
    )  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    fit = ["batch", "prefill-512", "prefix", "context-256"]
    assert [(row["scenario"], row["server"]) for row in rows(path)] == [
        (name, each) for name in fit for each in "ab"
    ]
    for name in ("prefill-2048", "prefill-8192", "mixed", "context-2048"):
        assert f"{name} is skipped" in ended.stderr
    table = [line.split(" | ")[0] for line in ended.stdout.splitlines()]
    assert table == ["| scenario", "| ---", *(f"| {name}" for name in fit)]
    tokens = {row["scenario"]: row["num_tokens"] for row in rows(path)}
    assert tokens["batch"] == 8 * 64
    assert tokens["prefix"] == 16 * 8
    assert all(row["num_events"] == row["num_tokens"] for row in rows(path))
    assert all(value > 0 for row in rows(path) for value in row["values"].values())


def test_servers_take_turns_and_each_round_begins_with_another(tmp_path: Path) -> None:
    """A warm-up of both comes first and is not kept; every prompt is new."""
    path = tmp_path / "rounds.jsonl"
    order: list[str] = []

    def noting(name: str) -> Callable[[int], Script]:
        def script(_: int) -> Script:
            order.append(name)
            return answer()

        return script

    with serving(SseServer(noting("a"))) as a, serving(SseServer(noting("b"))) as b:
        ended = run(
            path, f"a={a.url}", f"b={b.url}", "--scenarios", "prefill-2048", "--rounds", "3",
        )  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    assert order == list("aabb" + "aabb" + "bbaa" + "aabb")  # two requests each time
    prompts = {tuple(body["prompt"]) for body in a.bodies + b.bodies}
    assert len(prompts) == 16
    assert {len(prompt) for prompt in prompts} == {PROMPT}
    expected = {"model": "fake", "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    assert a.bodies[0].items() >= expected.items()


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """Recorded rounds are not sent again, and a cut last line is ignored."""
    path = tmp_path / "rounds.jsonl"
    with serving(SseServer(lambda _: answer())) as a, serving(SseServer(lambda _: answer())) as b:
        arguments = [f"a={a.url}", f"b={b.url}", "--scenarios", "prefill-2048", "--warmup", "0"]
        run(path, *arguments, "--rounds", "2")
        first = path.read_text().splitlines(keepends=True)
        assert len(first) == 4
        path.write_text("".join(first[:3]) + first[3][:20])
        sent = len(a.bodies), len(b.bodies)
        ended = run(path, *arguments, "--rounds", "2")
        assert ended.exit_code == 0
        # In the second round it was b's turn first, so a's is the one that is missing.
        assert (len(a.bodies), len(b.bodies)) == (sent[0] + 2, sent[1])
        again = path.read_text().splitlines(keepends=True)
        assert again[:3] == first[:3]
        assert len(again) == 4
        done = run(path, *arguments, "--rounds", "2", "--warmup", "1")
        assert (len(a.bodies), len(b.bodies)) == (sent[0] + 2, sent[1])
        assert done.stdout == ended.stdout


FULL = json.dumps({"error": {"message": "wait", "type": "rate", "code": "queue_full"}})
CACHED = usage(prompt_tokens_details={"cached_tokens": 1024})


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (answer(7, usage(num_output=7)), "8 tokens were asked for, the server counts 7"),
        (answer(3), "8 tokens were asked for, 3 events brought them"),
        (answer(8, usage(2049)), "the prompt has 2048 tokens, the server read 2049"),
        (answer(8, CACHED), "1024 of 2048 prompt tokens came from the server's cache"),
        ((429, FULL), "429 queue_full: wait"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_answer_that_is_not_what_was_asked_for_ends_the_scenario(
    bad: Script | tuple[int, str], said: str, tmp_path: Path
) -> None:
    """The exit code is 1, no median includes the round, and the next run repeats it."""
    path = tmp_path / "rounds.jsonl"
    answers: list[Any] = [answer(), answer(), answer(), bad]
    with serving(SseServer(lambda number: answers[number])) as a:
        ended = run(
            path, f"a={a.url}", "--scenarios", "prefill-2048", "--warmup", "0", "--rounds", "5"
        )
        assert ended.exit_code == 1
        assert f"prefill-2048 failed: a: {said}" in ended.stderr
        assert len(a.bodies) == 4
        assert ended.stdout.splitlines()[1].split()[-1] == "1"
        answers += [answer()] * 2
        assert run(
            path, f"a={a.url}", "--scenarios", "prefill-2048", "--warmup", "0", "--rounds", "2"
        ).exit_code == 0  # fmt: skip
    assert [(row["round"], bool(row["error"])) for row in rows(path)] == [
        *((0, False), (1, True), (1, False)),
    ]
