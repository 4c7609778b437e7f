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
    assert list(arrivals_of(list(enumerate(WHOLE)), 3)) == [0, 1, 2]
    halves = [WHOLE[0] + WHOLE[1][:20], WHOLE[1][20:] + WHOLE[2], WHOLE[3]]
    assert list(arrivals_of(list(enumerate(halves)), 3)) == [0, 1, 1]


@pytest.mark.parametrize(
    "pieces",
    [[WHOLE[0], *WHOLE[2:]], [WHOLE[1], WHOLE[0], *WHOLE[2:]], WHOLE[:3], [*WHOLE[:2], WHOLE[3]]],
    ids=["a token is missing", "another order", "no end of the stream", "no finish reason"],
)
def test_a_stream_that_is_not_whole_is_an_error(pieces: list[bytes]) -> None:
    """Nothing is measured then."""
    with pytest.raises(StreamError):
        arrivals_of(list(enumerate(pieces)), 3)
