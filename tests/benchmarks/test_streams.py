"""The client of `benchmarks.streams` accepts whole streams only."""

import json

import pytest

from benchmarks.streams import StreamError, arrivals_of


def event(number: int, reason: str | None = None) -> bytes:
    """The event of a token, as a chunk of HTTP."""
    choice = {"index": 0, "text": f" t{number}", "finish_reason": reason}
    body = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


WHOLE = [event(1), event(2), event(3, "length"), b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


def test_an_event_arrives_with_its_last_byte() -> None:
    """Pieces of the network need not be events."""
    halves = [WHOLE[0] + WHOLE[1][:20], WHOLE[1][20:] + WHOLE[2], WHOLE[3]]
    for pieces, expected in ((WHOLE, [0, 1, 2]), (halves, [0, 1, 1])):
        times_s, nums = arrivals_of(list(enumerate(pieces)), 3)
        assert (list(times_s), list(nums)) == (expected, [1, 1, 1])


def test_an_event_may_have_several_tokens() -> None:
    """The server's `--stream-interval`."""
    joined = event(2, "length").replace(b" t2", b" t2 t3")
    times_s, nums = arrivals_of(list(enumerate([WHOLE[0], joined, WHOLE[3]])), 3)
    assert (list(times_s), list(nums)) == ([0, 1], [1, 2])


@pytest.mark.parametrize(
    "pieces",
    [[WHOLE[0], *WHOLE[2:]], [WHOLE[1], WHOLE[0], *WHOLE[2:]], WHOLE[:3], [*WHOLE[:2], WHOLE[3]]],
    ids=["a token is missing", "another order", "no end of the stream", "no finish reason"],
)
def test_a_stream_that_is_not_whole_is_an_error(pieces: list[bytes]) -> None:
    """Nothing is measured then."""
    with pytest.raises(StreamError):
        arrivals_of(list(enumerate(pieces)), 3)
