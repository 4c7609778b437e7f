"""Logs as JSON and spans of OpenTelemetry, from one server, as collectors receive them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.server.load.soak_watch import wait_for
from tests.server.trace_collector import Collector, trace_collector
from tests.servers.processes import Server, run_to_end, running_server, without_replicas

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER_KIND = 2
pytestmark = without_replicas


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector of spans."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    with trace_collector() as running:
        yield running


@pytest.fixture(scope="module")
def told(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that logs JSON and sends its spans every tenth of a second."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice:secret-a\n")
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=of-this-test",
    }
    flags = ("--traces", "--log-format", "json", "--access-log", "all", "--api-key-file", str(keys))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with running_server(*flags) as running:
            yield running


def ask(server: Server, trace_id: str = TRACE, **body: Any) -> httpx.Response:
    """A completion with a caller's trace."""
    return httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": [7] * 300, "max_tokens": 40, "ignore_eos": True, **body},
        headers={
            "Authorization": "Bearer secret-a",
            "traceparent": f"00-{trace_id}-{PARENT}-01",
        },
        timeout=60,
    )


def test_a_request_has_a_span_and_so_has_each_of_its_phases(
    told: Server, collector: Collector
) -> None:
    """The phases follow one another inside the request, with the rotation that was applied."""
    before = time.time()
    answer = ask(told)
    after = time.time()
    spans = collector.trace(TRACE, 4)
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"}
    request = spans.pop("POST /v1/completions")
    assert (request.kind, request.parent_id) == (SERVER_KIND, PARENT)
    assert request.service == "of-this-test"
    assert {each.parent_id for each in spans.values()} == {request.span_id}
    applied = {"ropewalk.rope_type": "yarn", "ropewalk.factor": 2.0, "ropewalk.tier": 512}
    assert request.facts == {
        **applied,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "ropewalk.request_id": answer.headers["x-request-id"],
        "ropewalk.key": "alice",
        "ropewalk.aborted": False,
        "ropewalk.beyond_trained_length": False,
        "ropewalk.context_len": 340,
        "ropewalk.cached_tokens": answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.request.model": "ropewalk-demo",
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.output_tokens": 40,
    }
    lengths = {"queue": 300, "prefill": 300, "decode": 340}
    for name, length in lengths.items():
        assert applied.items() <= spans[name].facts.items()
        assert spans[name].facts["ropewalk.context_len"] == length
    queue, prefill, decode = (spans[name] for name in lengths)
    times = [
        *(before, request.began, queue.began, queue.ended, prefill.ended),
        *(decode.ended, request.ended, after),
    ]
    # The clocks of both processes are one, and a span's times are computed from two of it.
    assert all(one <= other + 0.005 for one, other in pairwise(times)), times
    assert (prefill.began, decode.began) == (queue.ended, prefill.ended)
    assert decode.ended > decode.began


def test_each_answer_of_a_request_has_its_phases(told: Server, collector: Collector) -> None:
    """Also those of streams."""
    trace_id = "1" * 32
    ask(told, trace_id, n=3, stream=True, max_tokens=2).raise_for_status()
    assert wait_for(
        lambda: len([each for each in collector.spans if each.trace_id == trace_id]) == 10
    )
    names = sorted(each.name for each in collector.spans if each.trace_id == trace_id)
    assert names == sorted(["POST /v1/completions", *3 * ["queue", "prefill", "decode"]])


def test_a_refused_request_has_a_span_with_its_status(told: Server, collector: Collector) -> None:
    """It has no phases. Probes have no span at all."""
    assert httpx.get(f"{told.url}/health").status_code == 200
    assert ask(told, "2" * 32, max_tokens=-1).status_code == 400
    (span,) = collector.trace("2" * 32, 1).values()
    assert span.facts["http.response.status_code"] == 400
    assert not span.has_failed, "a client's mistake is no failure of the server"
    assert {each.name for each in collector.spans} <= {
        *("POST /v1/completions", "queue", "prefill", "decode")
    }


def test_a_trace_begins_here_without_a_callers(told: Server, collector: Collector) -> None:
    """The line of the request has the id of the trace, in which it is found."""
    first = len(told.log)
    body = {"prompt": "a", "max_tokens": 2}
    headers = {"Authorization": "Bearer secret-a"}
    httpx.post(f"{told.url}/v1/completions", json=body, headers=headers).raise_for_status()
    assert wait_for(lambda: any('"trace_id"' in line for line in told.log[first:]))
    (line,) = (json.loads(each) for each in told.log[first:] if '"trace_id"' in each)
    spans = collector.trace(line["trace_id"], 4)
    assert spans["POST /v1/completions"].parent_id == ""


def test_every_line_is_a_json_object(told: Server) -> None:
    """Those before the model is loaded, and the banner, are events, too."""
    assert ask(told, "3" * 32, max_tokens=1).status_code == 200
    assert wait_for(lambda: any("3" * 32 in line for line in told.log))
    lines = [json.loads(line) for line in told.log]
    assert all({"timestamp", "level", "event"} <= each.keys() for each in lines)
    events = [each["event"] for each in lines]
    assert events[0] == "start"
    assert any("503 until the model" in each.get("message", "") for each in lines)
    (ready,) = (each for each in lines if each["event"] == "ready")
    assert ready["url"] == told.url
    assert any(line.startswith("self-check") for line in ready["banner"])
    (request,) = (each for each in lines if each.get("trace_id") == "3" * 32)
    assert (request["key"], request["status"], request["aborted"]) == ("alice", 200, False)
    assert request["completion_tokens"] == 1


def test_a_refusal_is_a_json_object_too() -> None:
    """A file that is not there ends a start before anything is loaded."""
    ended = run_to_end("serve", "--log-format", "json", "--api-key-file", "/none")
    assert ended.returncode == 2
    (line,) = (json.loads(each) for each in ended.stderr.splitlines())
    assert (line["level"], line["event"]) == ("error", "refused")
    assert line["message"] == "api_key_file: cannot read /none: No such file or directory"


@pytest.mark.parametrize("variable", ["OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_an_exporter_that_is_missing_is_a_sentence_at_once(
    collector: Collector, variable: str
) -> None:
    """Nothing is loaded before."""
    ended = run_to_end("serve", "--traces", env={variable: "x"})
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ropewalk: traces: the exporter 'x' is not installed")


@pytest.mark.long
def test_without_traces_nothing_of_the_sdk_is_imported() -> None:
    """It may be missing, which only those hear who ask for traces."""
    ended = subprocess.run(
        [sys.executable, "-c", _MISSING], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == [
        "traces needs OpenTelemetry: pip install "
        "'opentelemetry-exporter-otlp-proto-http>=1.30' 'opentelemetry-sdk>=1.30'",
        "[]",
        "False",
    ]


_MISSING = """
import sys
from importlib import metadata
there = metadata.version
def version(name):
    if name.startswith("opentelemetry"):
        raise metadata.PackageNotFoundError(name)
    return there(name)
metadata.version = version
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.named_places import check_traces
check_traces(load_settings({}))
try:
    check_traces(load_settings({"traces": True}))
except SettingsError as error:
    print(error)
import ropewalk.server.startup.app, ropewalk.server.startup.lifecycle
print([name for name in sys.modules if name.startswith("opentelemetry.sdk")])
print("ropewalk.server.access.spans" in sys.modules)
"""
