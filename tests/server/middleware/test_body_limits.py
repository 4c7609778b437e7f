"""Bodies above 32 KiB are parsed in a thread, have the same answers, and limits of their own."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ropewalk.server.middleware.body_limits import BodyLimits, BodyLimitsMiddleware
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.gate import body_limits_of
from tests.servers.processes import Server

_LONGEST = 2048  # tokens of the embedded model
_MAX_BYTES = 2**20 + 64 * _LONGEST
_MAX_VALUES = 131_072
_MAX_NUMBERS = _MAX_VALUES + 4 * _LONGEST
_JSON = {"Content-Type": "application/json"}
_PADDING = " " * 40_000
_ENDS = '"max_tokens": 3, "temperature": 0, "seed": 1}'


def post(server: Server, path: str, body: bytes | Iterator[bytes], **headers: str) -> Any:
    """Send a body to a route."""
    given = {**_JSON, **headers}
    return httpx.post(server.url + path, content=body, headers=given, timeout=60)


def without_ids(answer: httpx.Response) -> Any:
    """An answer's status and body, without the parts that always differ."""
    found = answer.json()
    found.pop("id", None)
    found.pop("created", None)
    return answer.status_code, found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "a",' + _ENDS),
        ("/v1/completions", '{"prompt": [[1], [2, 3]],' + _ENDS),
        (
            "/v1/completions",
            '{"prompt": [1, "a"], "n": 0, "nn": 1, "rope": {"factor": NaN},' + _ENDS,
        ),
        ("/v1/completions", '{"prompt": "a", "prompt": "b",' + _ENDS),
        ("/v1/completions", '{"prompt": "a"'),
        ("/v1/completions", "[1, 2]"),
        ("/v1/completions", '{"prompt": ' + "9" * 5000 + "}"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}],' + _ENDS),
        ("/v1/chat/completions", '{"messages": [{"role": "user"}, {"role": "x"}],' + _ENDS),
        ("/v1/messages", '{"messages": [{"role": "user", "content": 5}], "max_tokens": 1}'),
        ("/tokenize", '{"prompt": "a rope"}'),
        ("/no/such/route", "{}"),
    ],
)
def test_a_large_body_has_the_answer_of_a_small_one(server: Server, path: str, body: str) -> None:
    """Spaces at the end make it large; values, mistakes and unreadable texts are told alike."""
    small = post(server, path, body.encode())
    large = post(server, path, (body + _PADDING).encode())
    if "not valid JSON" in small.text:  # its character is that of the end
        assert large.json()["error"]["message"] == "The body is not valid JSON, at character 40014."
        return
    assert without_ids(large) == without_ids(small)


def test_a_large_body_of_another_type_is_refused_as_a_small_one(server: Server) -> None:
    """It is not parsed at all."""
    small, large = (
        post(server, "/v1/completions", body, **{"Content-Type": "text/plain"})
        for body in (b'{"prompt": "a"}', b'{"prompt": "a"}' + b" " * 40_000)
    )
    assert small.status_code == 400
    assert large.json() == small.json()


@pytest.mark.parametrize(
    ("value", "num", "told"),
    [
        ("[]", _MAX_VALUES, f"{_MAX_VALUES} values"),
        ('""', _MAX_VALUES, f"{_MAX_VALUES} values"),
        ("null", _MAX_VALUES, f"{_MAX_VALUES} values"),
        ("1", _MAX_NUMBERS + 2, f"{_MAX_NUMBERS} numbers, by its commas"),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_they_are_made(
    server: Server, value: str, num: int, told: str
) -> None:
    """The error names the limit; that of numbers follows from the longest context."""
    body = f'{{"prompt": [{",".join([value] * num)}]}}'
    assert len(body) < _MAX_BYTES
    answer = post(server, "/v1/completions", body.encode())
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": f"The body must have at most {told}.",
        "type": "invalid_request_error",
        "param": None,
        "code": "too_many_values",
    }


def test_a_batch_of_the_longest_prompts_as_ids_is_taken(server: Server) -> None:
    """lm-evaluation-harness sends batches of token ids."""
    ids = "[" + ",".join(["7"] * (_LONGEST - 8)) + "]"
    body = f'{{"max_tokens": 1, "prompt": [{",".join([ids] * 64)}], "max_token": 1}}'
    answer = post(server, "/v1/completions", body.encode())  # refused for the last field alone
    assert "max_token" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("size", [_MAX_BYTES + 1, 2 * _MAX_BYTES, 20 * _MAX_BYTES])
def test_a_body_above_the_limit_is_refused_and_the_client_learns_it(
    server: Server, size: int, *, is_chunked: bool
) -> None:
    """The client still sends while the answer comes, which a closed connection would take back."""
    pieces = iter([b" " * 65_536] * (size // 65_536) + [b" " * (size % 65_536)])
    answer = post(server, "/tokenize", pieces if is_chunked else b" " * size)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == "body_too_large"
    assert error["message"] == f"The body must be at most {_MAX_BYTES} bytes (max_body_bytes)."


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
def test_a_prompt_that_cannot_fit_gets_the_code_of_its_length(server: Server, path: str) -> None:
    """Clients that shorten a conversation look for it; 413 says nothing to them."""
    answer = post(server, path, json.dumps({"prompt": [7] * 600_000}).encode())
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"{_LONGEST} tokens" in error["message"]
    assert f"{_MAX_BYTES} bytes (max_body_bytes)" in error["message"]


def test_a_limit_below_the_context_is_no_matter_of_its_length() -> None:
    """An operator may take less than the context holds."""
    small = body_limits_of(load_settings({"max_body_bytes": "30000"}), 2048)
    assert small.too_large("/v1/completions").status == 413


def test_the_longest_context_fits_into_a_body_in_the_longest_spelling() -> None:
    """A character of another script is six bytes if it is escaped; prompts of ids have commas."""
    for max_len in (16, 2048, 131_072, 2**20):
        limits = body_limits_of(load_settings({}), max_len)
        ids = json.dumps({"prompt": [151_000] * max_len})
        words = json.dumps({"messages": [{"role": "user", "content": "\u6587\u5b57" * max_len}]})
        assert len(ids) < limits.max_bytes
        assert len(words) < limits.max_bytes
        assert max_len < limits.max_numbers
        assert limits.max_total_bytes >= 4 * limits.max_bytes


async def _sent(limited: BodyLimitsMiddleware, *pieces: bytes) -> tuple[int, Any]:
    """Status and error code of a body in these pieces, whose end never comes."""
    waiting, sent = list(pieces), []

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": waiting.pop(0), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": []}
    await limited(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(body)["error"]["code"]


async def _refused_together() -> list[tuple[int, Any]]:
    limits = BodyLimits(max_bytes=10**6, max_total_bytes=2 * 10**6, timeout_s=0.2)

    async def none(*_: Any) -> None:
        raise AssertionError("no body is whole")

    limited = BodyLimitsMiddleware(none, limits)
    first = await asyncio.gather(*(_sent(limited, b" " * 900_000) for _ in range(4)))
    # Their memory is free again.
    return [*first, await _sent(limited, b" " * 900_000)]


def test_bodies_in_arrival_have_a_time_and_a_bound_together() -> None:
    """Two of four fit, and wait for their ends. The others are told to come again at once."""
    late, full = (408, "body_timeout"), (503, "bodies_full")
    assert asyncio.run(_refused_together()) == [late, late, full, full, late]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_a_compressed_body_is_refused_with_its_header(server: Server, path: str) -> None:
    """The body was read as JSON, and the message was about its first character."""
    body = gzip.compress(b'{"prompt": "a"}')
    answer = post(server, path, body, **{"Content-Encoding": "gzip"})
    error = answer.json()["error"]
    assert (answer.status_code, error.get("code", "compressed_body")) == (415, "compressed_body")
    assert error["message"] == (
        "The header Content-Encoding must be identity, or left out: send the body without "
        "compression. Given: 'gzip'."
    )
    plain = post(server, "/tokenize", b'{"prompt": "a"}', **{"Content-Encoding": "identity"})
    assert plain.status_code == 200
