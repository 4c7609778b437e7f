"""A second run's events against those of the first, by the events of a stream."""

import asyncio
import json
import random
from contextlib import suppress

import pytest

from ropewalk.server.router.body_chunks import NO_CHUNKS
from ropewalk.server.router.fleet.fleet import Fleet
from ropewalk.server.router.forward import Asked, Forwarder
from ropewalk.server.router.replay import (
    DivergedError,
    EventSplitter,
    SentEvents,
    events_in,
    tells_failure,
)
from ropewalk.server.router.route_metrics import RouteMetrics
from ropewalk.server.settings.route_settings import RouteSettings


def event(text: str, **fields: object) -> bytes:
    return b"data: " + json.dumps({"text": text, **fields}).encode() + b"\n\n"


OPENING, KEEP_ALIVE = b": open\n\n", b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STREAM = [OPENING, *(event(f"token {number}") for number in range(3000)), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("num_sent", [0, 1, 2, 700, 2999, 3002])
def test_a_client_gets_every_event_once(num_sent: int) -> None:
    """Any cut of the two runs into chunks gives the whole stream, also compressed."""
    rng = random.Random(num_sent)
    sent = SentEvents()
    got = b"".join(STREAM[:num_sent])
    for each in STREAM[:num_sent]:
        sent.keep(each)
    for _ in range(2):  # a second run that is lost in the repetition, and a third
        sent.begin_again()
        assert sent.beyond(b"".join(STREAM[: num_sent // 2])) == b""
    sent.begin_again()
    splitter = EventSplitter()
    rest = b"".join(STREAM)
    while rest:
        size = rng.randrange(1, 3000)
        new = sent.beyond(splitter.feed(rest[:size]))
        rest = rest[size:]
        sent.keep(new)
        got += new
    assert sent.is_repeated()
    assert not splitter.has_rest
    comments = got.count(OPENING)
    assert got.replace(OPENING, b"") == b"".join(STREAM[1:])
    assert comments >= min(num_sent, 1)
    assert sent.num_events() == len(STREAM) - 1


def of_choice(index: int, number: int) -> bytes:
    return event("", choices=[{"index": index, "text": f"{number}"}])


@pytest.mark.parametrize("num_sent", [1, 40, 900, 1100])
def test_choices_may_come_in_another_order(num_sent: int) -> None:
    """Each choice gets every event once and in turn, and the end comes last."""
    rng = random.Random(num_sent)
    end = [event("", choices=[], usage={"total_tokens": 9}), b"data: [DONE]\n\n"]

    def run() -> list[bytes]:
        order = [index for index in range(3) for _ in range(400)]
        rng.shuffle(order)
        nexts = [iter(range(400)) for _ in range(3)]
        return [of_choice(index, next(nexts[index])) for index in order] + end

    sent = SentEvents()
    got = run()[:num_sent]
    sent.keep(b"".join(got))
    for num_repeated in (500, 1202):  # the second server is lost, too
        sent.begin_again()
        for each in run()[:num_repeated]:
            new = sent.beyond(each)
            sent.keep(new)
            got += [new] if new else []
    assert sent.is_repeated()
    assert got[-2:] == end
    for index in range(3):
        own = [each for each in got if each.startswith(of_choice(index, 0)[:-10])]
        assert own == [of_choice(index, number) for number in range(400)]


def test_another_text_of_one_choice_is_no_continuation() -> None:
    sent = SentEvents()
    sent.keep(of_choice(0, 0) + of_choice(1, 0) + of_choice(1, 1))
    sent.begin_again()
    assert sent.beyond(of_choice(1, 0) + of_choice(0, 0) + of_choice(0, 1)) == of_choice(0, 1)
    assert not sent.is_repeated()
    with pytest.raises(DivergedError):
        sent.beyond(of_choice(1, 2))


def test_another_text_is_no_continuation() -> None:
    """The client has `a`, `b`; a run of `a`, `c` gives nothing."""
    sent = SentEvents()
    sent.keep(event("a") + event("b"))
    sent.begin_again()
    with pytest.raises(DivergedError):
        sent.beyond(event("a") + event("c") + event("d"))


def test_an_answer_that_ends_early_is_not_repeated() -> None:
    sent = SentEvents()
    sent.keep(event("a") + event("b"))
    sent.begin_again()
    assert sent.beyond(event("a")) == b""
    assert not sent.is_repeated()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (event("a") + KEEP_ALIVE, event("a")),
        (event("a"), KEEP_ALIVE + event("a") + PING),
        (event("a", usage={"cached_tokens": 3}), event("a", usage={"cached_tokens": 64})),
        (event("", input_tokens=9, cache_read_input_tokens=0),
         event("", input_tokens=1, cache_read_input_tokens=8)),
        (event("a", timings={"prompt_ms": 1.5}), event("a", timings={"prompt_ms": 2.25})),
        (event("", prompt_progress={"total": 9, "processed": 1}) + event("a"), event("a")),
        (event("a", completed_at=None), event("a", completed_at=17)),
    ],
)  # fmt: skip
def test_what_tells_of_the_run_is_not_compared(first: bytes, second: bytes) -> None:
    sent = SentEvents()
    sent.keep(first)
    sent.begin_again()
    assert sent.beyond(second + event("new")).endswith(event("new"))
    assert sent.is_repeated()


def test_the_same_words_in_a_text_are_compared() -> None:
    """A text may hold JSON of its own, whose quotes are escaped."""
    sent = SentEvents()
    sent.keep(event('{"cached_tokens": 3}'))
    sent.begin_again()
    with pytest.raises(DivergedError):
        sent.beyond(event('{"cached_tokens": 4}'))


def test_failures_of_a_server_are_told_from_those_of_a_request() -> None:
    """The events are those that a server sends after the first byte, by API."""
    failures = [
        event("").replace(b'{"text": ""', b'{"error": {"code": "engine_stopped"}'),
        b'event: error\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n',
        b'event: response.failed\ndata: {"response": {"error": {"code": "server_error"}}}\n\n',
    ]
    for failure in failures:
        assert tells_failure(failure)
        other = failure.replace(b"engine_stopped", b"x").replace(b"api_error", b"x")
        assert not tells_failure(other.replace(b"server_error", b"invalid_prompt"))
    assert not tells_failure(event('event: error "engine_stopped"'))
    for failure in failures:  # its client did not read
        unread = failure.replace(b'"engine_stopped"', b'"output_not_read"')
        unread = unread.replace(b'"server_error"', b'"output_not_read"')
        assert not tells_failure(unread.replace(b'_error"}', b'_error", "code":"output_not_read"}'))
        told = failure.replace(b'error": {', b'error": {"message": "of output_not_read", ')
        assert tells_failure(told), "the message is not the code"
    assert list(events_in(b"".join(failures))) == failures


def test_events_that_a_cancelled_send_has_not_written_are_not_the_clients() -> None:
    """Else a number of the error event behind them would tell of a hole."""

    async def test() -> None:
        settings = RouteSettings(servers=("http://127.0.0.1:1",))
        forwarder = Forwarder(settings, Fleet(settings), RouteMetrics())
        asked = Asked("a", "POST", "/v1/responses", [], b"", NO_CHUNKS, None, has_events=True)
        is_blocked = asyncio.Event()

        async def send(_: bytes) -> None:
            if is_blocked.is_set():
                await asyncio.Event().wait()

        event = b"data: 1\n\n"
        await forwarder._send_new(asked, event, send, is_again=False)
        is_blocked.set()
        sending = asyncio.ensure_future(forwarder._send_new(asked, event, send, is_again=False))
        await asyncio.sleep(0)
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
        assert asked.sent.num_events() == 1

    asyncio.run(test())
