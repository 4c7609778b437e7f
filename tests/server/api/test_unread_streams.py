"""A stream whose client stops reading is ended by the bound on unread outputs alone."""

import json
from typing import Any

from tests.server.fuzz.attack import wait_until_idle
from tests.server.fuzz.breakable import AUTHORIZED
from tests.server.fuzz.raw_http import read_replies, request
from tests.server.load.soak_watch import wait_for
from tests.server.load.test_slow_clients import opened
from tests.server.test_metrics import samples, value
from tests.servers.processes import Server

_MAX_TOKENS = 2000
_TAKEN = 300  # tokens of the one that reads: several times the bound


def ended(server: Server, reason: str) -> float:
    """The number of requests that ended for this reason."""
    return sum(
        count
        for (name, labels), count in samples(server).items()
        if name == "ropewalk_requests_total" and ("finish_reason", reason) in labels
    )


def stream_of(max_tokens: int) -> bytes:
    """The request, with large events: 20 alternatives a token."""
    body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 20}
    headers = (("Content-Type", "application/json"), *AUTHORIZED.items())
    return request(json.dumps({**body, "stream": True}).encode(), headers=headers)


def events_of(body: bytes) -> list[Any]:
    """The JSON events of a stream that is over."""
    found = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert found.pop() == "[DONE]"
    return [json.loads(each) for each in found]


def test_a_reader_that_lags_too_far_behind_gets_an_error_and_frees_its_pages(
    breakable: Server,
) -> None:
    """A stream that lags ends long before the timeout of sending, which is ten minutes here."""
    aborted, generated = ended(breakable, "abort"), value(breakable, "generated_tokens_total")
    with opened(breakable, 1, tiny=True) as (sock,):
        sock.sendall(stream_of(_MAX_TOKENS))
        assert wait_for(lambda: ended(breakable, "abort") == aborted + 1, 60)
        assert not any(wait_until_idle(breakable).values())
        assert value(breakable, "generated_tokens_total") - generated < _MAX_TOKENS
        (reply,) = read_replies(sock, 1, 60)
    events = events_of(reply.body)
    assert events[-1]["error"]["code"] == "output_not_read"
    assert "64 outputs were not read" in events[-1]["error"]["message"]
    assert len(events) - 1 < _MAX_TOKENS


def test_a_reader_that_keeps_up_is_never_behind(breakable: Server) -> None:
    """The same stream ends with its finish reason if it is read as it comes."""
    with opened(breakable, 1) as (sock,):
        sock.sendall(stream_of(_TAKEN))
        (reply,) = read_replies(sock, 1, 120)
    events = events_of(reply.body)
    assert len(events) == _TAKEN
    assert events[-1]["choices"][0]["finish_reason"] == "length"
