"""The bodies of answers by their framing, against h11's own reading of the same bytes."""

import random

import h11
import pytest

from ropewalk.server.router.body_parser import BodyParser, FramingError

CHUNKED = [(b"transfer-encoding", b"chunked")]


def by_h11(data: bytes) -> bytes:
    """The body of a chunked answer as h11 reads it."""
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data)
    found = b""
    while not isinstance(event := peer.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            found += bytes(event.data)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_chunks_are_read_however_they_arrive(seed: int) -> None:
    """Random chunks, extensions and trailers, cut anywhere."""
    rng = random.Random(seed)
    parts = [rng.randbytes(rng.randrange(1, 300)) for _ in range(40)]
    data = b"".join(
        b"%x%b\r\n%b\r\n" % (len(each), rng.choice([b"", b";a=b"]), each) for each in parts
    )
    data += rng.choice([b"0\r\n\r\n", b"0\r\nX-Trailer: 1\r\n\r\n"])
    parser, found, at = BodyParser("GET", 200, CHUNKED), b"", 0
    while at < len(data):
        assert not parser.is_over
        size = rng.choice([1, 2, 3, 50, 400])
        found += b"".join(parser.feed(data[at : at + size]))
        at += size
    assert parser.is_over
    assert found == b"".join(parts) == by_h11(data)


@pytest.mark.parametrize(
    "data",
    [b"zz\r\n", b"-1\r\n", b"1\r\nab\r\n", b"+1\r\na", b"0x1\r\na", b"0\r\n\r\nmore", b"1" * 5000],
)
def test_wrong_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(FramingError):
        BodyParser("GET", 200, CHUNKED).feed(data)


def test_a_length_counts_the_body() -> None:
    parser = BodyParser("GET", 200, [(b"content-length", b"5")])
    assert parser.feed(b"abc") == [b"abc"]
    assert not parser.is_over
    assert parser.feed(b"de") == [b"de"]
    assert parser.is_over
    with pytest.raises(FramingError):
        parser.feed(b"f")


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
def test_some_answers_have_no_body(method: str, status: int) -> None:
    assert BodyParser(method, status, [(b"content-length", b"5")]).is_over


def test_without_a_length_the_connection_ends_the_body() -> None:
    parser = BodyParser("GET", 200, [])
    assert parser.ends_with_connection
    assert parser.feed(b"abc") == [b"abc"]
    assert not parser.is_over
