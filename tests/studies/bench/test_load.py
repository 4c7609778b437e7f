"""The load generator measures the true times of a server whose delays are known."""

import json
import socket
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ropewalk.studies.bench.command import bench
from tests.servers.sse_server import DONE, Script, SseServer, data, serving, token

pytestmark = pytest.mark.alone

FIRST_S, GAP_S = 0.25, 0.1
USAGE = data(choices=[], usage={"prompt_tokens": 70, "completion_tokens": 3})
ANSWER: Script = [
    (FIRST_S / 2, ": keep-alive\n\n"),  # neither this
    (0, data(choices=[])),  # nor this is a token
    # Cut anywhere on its way; line separators for Python are none for the protocol.
    (FIRST_S / 4, token("a\u2028b\x85c")[:20]),
    (FIRST_S / 4, token("a\u2028b\x85c")[20:]),
    (GAP_S, ": still here\n\n" + token("")),  # a part of a character is a token without text
    (GAP_S, token("d\r\n")),
    (0, token("", finish_reason="length")),  # one event more than usage counts
    (0, USAGE),
    (GAP_S, DONE),
]
QUICK: Script = [(0, token()), (0, token()), (0, token()), (0, USAGE), (0, DONE)]


def run(server: SseServer, *arguments: str) -> tuple[Result, dict[str, Any]]:
    """The command with JSON on standard output: how it ended, and its one length."""
    defaults = ["--context-lens", "64", "--warmup", "0", "--json", "-"]
    ended = CliRunner().invoke(bench, [server.url, *defaults, *arguments])
    assert isinstance(ended.exception, SystemExit | None)  # a bug would look like code 1
    (result,) = json.loads(ended.stdout)["results"]
    return ended, result


def test_times_are_those_that_the_server_slept() -> None:
    """Comments, empty events and the closing event are not counted as tokens."""
    with serving(SseServer(lambda _: ANSWER)) as server:
        ended, result = run(server, "--requests", "3")
    assert ended.exit_code == 0
    requests = result["requests"]
    for request in requests:  # a sleep may be longer than it should be, never shorter
        assert request["time_to_first_token_s"] >= FIRST_S
        assert request["end_to_end_s"] >= FIRST_S + 3 * GAP_S
        assert len(request["inter_token_s"]) == 2
        assert (request["prompt_tokens"], request["completion_tokens"]) == (70, 3)
    # The least disturbed of them; the machine has other things to do.
    assert min(each["time_to_first_token_s"] for each in requests) < FIRST_S + GAP_S
    assert min(each["end_to_end_s"] for each in requests) < FIRST_S + 4 * GAP_S
    assert result["inter_token_s"]["p50"] == pytest.approx(GAP_S, abs=GAP_S / 2)
    assert 2 / (FIRST_S + 3 * GAP_S) < result["output_tokens_per_s"] <= 3 / (FIRST_S + 3 * GAP_S)
    assert 50 / FIRST_S < result["prefill_tokens_per_s"] <= 70 / FIRST_S


def test_without_tokenize_prompts_are_words() -> None:
    """The length of a prompt of words is the one that the usage states."""
    with serving(SseServer(lambda _: QUICK)) as server:
        ended, result = run(server, "--requests", "2")
    assert json.loads(ended.stdout)["settings"]["prompt_kind"] == "words"
    assert result["prompt_tokens"] == 70
    prompts = [body["prompt"] for body in server.bodies]
    assert all(54 <= len(prompt.split()) <= 64 for prompt in prompts)
    assert prompts[0] != prompts[1]


def test_with_tokenize_prompts_are_ids_that_occurred() -> None:
    """The body is OpenAI's, and the key is in its header only."""
    with serving(SseServer(lambda _: QUICK, tokens=[5, 6, 7, 900])) as server:
        ended, _ = run(
            server, "--requests", "1", "--api-key", "hush", "--output-tokens", "3",
            "--rope", '{"factor": 2}',
        )  # fmt: skip
    (body,) = server.bodies
    assert len(body.pop("prompt")) == 64
    assert body == {
        "model": "fake",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rope": {"factor": 2},
    }
    assert server.headers[0]["Authorization"] == "Bearer hush"
    assert "hush" not in ended.output


FULL = json.dumps({"error": {"message": "wait", "type": "rate", "code": "queue_full"}})
VLLM = json.dumps({"error": {"message": "no", "type": "BadRequestError", "code": 400}})
STOPPED = data(error={"message": "gone", "type": "server_error", "code": "engine_stopped"})


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ((429, FULL), "429 queue_full"),
        ((400, VLLM), "400 BadRequestError"),
        ((502, "<html>bad gateway</html>"), "502"),
        ([(0, token()), (0.5, STOPPED), (0, DONE)], "stream engine_stopped"),
        ([(0.5, token()), (0, token())], "stream cut"),
        ([(0.5, USAGE), (0, DONE)], "stream without token"),
        ([(0.5, "data: {oops\n\n"), (0, DONE)], "stream unreadable"),
        ([(0.5, token())] * 4 + [(0, DONE)], "timeout"),  # never silent for long
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_failures_are_counted_by_kind_and_never_averaged(
    bad: Script | tuple[int, str], kind: str
) -> None:
    """The server gets each request once, because failed ones are not retried."""
    answers = [QUICK, bad, QUICK, QUICK, bad]
    with serving(SseServer(lambda number: answers[number])) as server:
        ended, result = run(server, "--requests", "5", "--timeout-seconds", "1.5")
    assert ended.exit_code == 1
    assert len(server.bodies) == 5
    assert result["failures"] == {kind: 2}
    assert (result["num_sent"], result["num_measured"], result["num_failed"]) == (5, 3, 2)
    assert result["time_to_first_token_s"]["max"] < 0.4
    assert result["completion_tokens"] == 9
    assert f"failed: 2 x {kind}: " in ended.stderr


def test_a_failure_of_the_warm_up_is_a_failure() -> None:
    """The warm-up counts for failures, though not for times."""
    answers = [(503, "starting"), QUICK, QUICK]
    with serving(SseServer(lambda number: answers[number])) as server:
        ended, result = run(server, "--warmup", "1", "--requests", "2")
    assert ended.exit_code == 1
    assert (result["num_sent"], result["num_measured"], result["num_failed"]) == (3, 2, 1)


def test_as_many_are_in_flight_as_were_asked_for() -> None:
    """The throughput is that of a whole group in flight."""
    with serving(SseServer(lambda _: ANSWER)) as server:
        _, result = run(server, "--requests", "6", "--concurrency", "3")
    assert server.most_in_flight == 3
    assert [each["round"] for each in result["requests"]] == [0, 0, 0, 1, 1, 1]
    # Nine tokens in the time of a group; one request after the other would make it three.
    assert 6 / (FIRST_S + 3 * GAP_S) < result["output_tokens_per_s"] <= 9 / (FIRST_S + 3 * GAP_S)


def test_prompts_from_the_cache_are_remarked_on() -> None:
    """Cached prompts make first tokens look early."""
    usage = {
        "prompt_tokens": 70,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    cached = [*QUICK[:3], (0, data(choices=[], usage=usage)), (0, DONE)]
    with serving(SseServer(lambda _: cached)) as server:
        ended, result = run(server, "--requests", "2")
    assert result["cached_tokens"] == 96
    assert "96 prompt tokens came from the server's prefix cache" in ended.stderr


@pytest.mark.parametrize(
    "name",
    [
        "ropewalk_draft_tokens_accepted_total",
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"}',
    ],
)
def test_tokens_from_drafts_are_explained(name: str) -> None:
    """They come together, so the gaps between them are almost 0."""

    def metrics(num_requests: int) -> str:
        return f"# TYPE x counter\n{name} {1.5e3 + 2 * num_requests}\n{name}x 7.0\n"

    with serving(SseServer(lambda _: QUICK, metrics=metrics)) as server:
        ended, _ = run(server, "--requests", "2")
    assert json.loads(ended.stdout)["accepted_draft_tokens"] == 4
    assert "4 tokens came from drafts: one step then gives several tokens at once" in ended.stderr


def test_no_word_of_drafts_where_the_server_tells_of_none() -> None:
    """Its metrics may have no such counter."""
    with serving(SseServer(lambda _: QUICK)) as server:
        ended, _ = run(server, "--requests", "1")
    assert json.loads(ended.stdout)["accepted_draft_tokens"] is None
    assert "drafts" not in ended.stderr


def test_a_server_that_is_not_there_ends_with_code_2() -> None:
    """An invalid URL ends the same way."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: no server answers
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        ended = CliRunner().invoke(bench, [url])
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"ropewalk bench: cannot reach {url}/v1/models: ")
    ended = CliRunner().invoke(bench, ["localhost:8000"])
    assert ended.exit_code == 2
    told = "the URL needs http:// or https:// in front, got localhost:8000"
    assert ended.stderr == f"ropewalk bench: {told}\n"
    for url in ("http://[", "http://a:port"):
        ended = CliRunner().invoke(bench, [url])
        assert ended.exit_code == 2
        assert ended.stderr.startswith("ropewalk bench: cannot reach ")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("<html>", "/v1/models answered what is not OpenAI's: the body: "),
        ('{"data": [{}]}', "/v1/models answered what is not OpenAI's: data.0.id: "),
        ('{"data": []}', " serves no model"),
        ('{"data": [{"id": "a"}]}', "the server does not report its max_model_len: give"),
    ],
)
def test_a_server_of_another_kind_ends_with_code_2(models: str, message: str) -> None:
    """A sentence states the reason, and no request is sent."""
    with serving(SseServer(lambda _: QUICK, models=models)) as server:
        ended = CliRunner().invoke(bench, [server.url])
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert server.bodies == []
