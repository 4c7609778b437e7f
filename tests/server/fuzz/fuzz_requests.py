"""Hostile HTTP from a seed: whole requests as bytes, most of them around hostile bodies."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.server.fuzz.fuzz_bodies import Body, body
from tests.server.fuzz.raw_http import request

_GOOD = b'{"prompt": "a", "max_tokens": 1}'
_JSON = ("Content-Type", "application/json")
_TYPES = (
    *("text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-16"),
    *("application/json, text/html", "multipart/form-data; boundary=x", "multipart/form-data"),
    *("application/" + "x" * 5000, "APPLICATION/JSON", "application/vnd.api+json", "\xff\xfe", ";"),
)
_PATHS = (
    *("/v1/models/" + "x" * 40_000, "/v1/models/%00%ff%2e%2e", "/v1/models/" + "%C3%A9" * 3000),
    *("/v1/models/%ED%A0%80", "/v1/models//", "//v1//completions", "/%2e%2e/%2e%2e/etc/passwd"),
    *("/v1/completions?" + "a=b&" * 5000, "/v1/completions#x", "http://evil/v1/models", "*", "/"),
    *(
        "/metrics?x=" + "y" * 9000,
        "/docs/../health",
        "/health%0d%0aX-A:b",
        "/v1/models/a%22%3Cb%3E",
    ),
    *("/tokenize/", "/V1/MODELS", "/v1/models/" + "/" * 3000, "/openapi.json", "/tokenizer_info"),
)
_METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT", "BREW", "X" * 9)


@dataclass(frozen=True, slots=True)
class Case:
    """The bytes of a case, and the answers that are allowed."""

    kind: str
    raw: bytes
    num_replies: int = 1
    may_be_silent: bool = False  # the request is not complete: the server may wait for the rest
    is_head: bool = False  # an answer to HEAD has a length and no body


def case(seed: int, number: int) -> Case:
    """The case of that number: the same one for the same seed."""
    rng = Random(f"{seed}/{number}")
    if rng.random() < 0.75:
        return _around(body(rng), rng)
    made = rng.choice(_HTTP)(rng)
    assert made.raw
    return made


def _around(hostile: Body, rng: Random) -> Case:
    """A body in a right request, sometimes with a wrong type."""
    content_type = rng.choice(_TYPES) if rng.random() < 0.05 else "application/json"
    raw = request(hostile.content, hostile.path, headers=(("Content-Type", content_type),))
    return Case(f"body/{hostile.kind}", raw)


def _headers(rng: Random) -> Case:
    """Headers that are huge, many, or malformed."""
    name, value = "X-A", "b"
    count, kind = 1, rng.choice(["long value", "many", "long name", "odd"])
    if kind == "many":
        count = rng.choice([90, 150, 1000, 20_000])
    elif kind == "long value":
        value = rng.choice(["v", "\xe9", '"']) * rng.choice([4000, 30_000, 70_000, 1_000_000])
    elif kind == "long name":
        name = "N" * rng.choice([300, 70_000])
    else:
        name, value = rng.choice(
            [
                *(("X A", "b"), ("", "b"), ("X-A", "\x00"), ("X-A", "a\x01b"), ("X\xe9", "b")),
                *(
                    ("X-A\x00", "b"),
                    ("X-A", "a\r\n b"),
                    ("X-A", "a\rb"),
                    ("X-A", "\x7f"),
                    ("(", "b"),
                ),
                *(
                    ("Host", "two"),
                    ("Content-Length", "5"),
                    ("Content-Length", "-1"),
                    ("Range", "x"),
                ),
                *(("Content-Encoding", "gzip"), ("Expect", "100-continue"), ("Expect", "magic")),
                *(("Upgrade", "websocket"), ("Upgrade", "h2c"), ("Cookie", "=;=;" * 999)),
                *(("X-Request-Id", "\x1b[31m" * 40), ("X-Request-Id", "r" * 5000)),
                *(
                    ("X-Request-Id", "a b"),
                    ("Authorization", "Bearer \xff"),
                    ("Accept", "*/" * 3000),
                ),
                *(("Origin", "null"), ("X-Forwarded-For", "::1," * 500), ("Connection", "upgrade")),
            ]
        )
    headers = (_JSON, *((name, value) for _ in range(count)))
    # `Content-Length: 5` before ours is two lengths; nothing may be read as a second request.
    return Case(f"headers/{kind}", request(_GOOD, headers=headers))


def _lengths(rng: Random) -> Case:
    """A Content-Length that is not the body's."""
    length = rng.choice(
        [
            *("0", "1", "31", "33", "100000", "99999999999999999999", "-5", "+32", "0x20", "3 2"),
            *("", "1e1", "32, 32", "32, 33", "\xb2", "032", "9" * 5000),
        ]
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    return Case("length", head.encode("latin-1") + _GOOD, may_be_silent=True)


def _chunked(rng: Random) -> Case:
    """Chunks that are wrong in one way, or valid."""
    size = b"%x" % len(_GOOD)
    chunks = rng.choice(
        [
            *(size + b"\r\n" + _GOOD + b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"zz\r\n" + _GOOD),
            *(
                b"-5\r\n" + _GOOD,
                b"ffffffffffffffffff\r\n" + _GOOD,
                b"5\r\n" + _GOOD + b"\r\n0\r\n",
            ),
            *(size + b";" + b"x" * 9000 + b"\r\n" + _GOOD + b"\r\n0\r\n\r\n", b"\r\n\r\n", b"5"),
            *(size + b"\n" + _GOOD + b"\n0\n\n", size + b"\r\n" + _GOOD, b"1\r\n{\r\n" * 3000),
            size + b"\r\n" + _GOOD + b"\r\n0\r\nX-T: " + b"t" * 80_000 + b"\r\n\r\n",
            b"".join(b"1\r\n%c\r\n" % byte for byte in _GOOD) + b"0\r\n\r\n",
        ]
    )
    encoding = rng.choice(
        ["chunked"] * 6
        + ["gzip, chunked", "chunked, chunked", "identity", "x", "CHUNKED", "\x0bchunked"]
    )
    both = rng.choice(["", "Content-Length: 3\r\n"])
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"{both}Transfer-Encoding: {encoding}\r\nConnection: close\r\n\r\n"
    return Case("chunked", head.encode("latin-1") + chunks, may_be_silent=True)


def _targets(rng: Random) -> Case:
    """Any method on any path."""
    method, path = rng.choice([*_METHODS, "GET", "GET", "POST"]), rng.choice(_PATHS)
    raw = request(b"", path, method=method, headers=())
    return Case("target", raw, is_head=method == "HEAD", may_be_silent=method == "CONNECT")


def _pipelined(rng: Random) -> Case:
    """Several requests at once; each is answered, in order."""
    count = rng.choice([2, 3, 20])
    one = rng.choice([_GOOD, b"{}", b'{"prompt": NaN}', b"[" * 300, body(rng).content[:2000]])
    raws = [request(one, headers=(_JSON,), close=number == count - 1) for number in range(count)]
    return Case("pipelined", b"".join(raws), num_replies=count)


def _cut(rng: Random) -> Case:
    """A request that ends anywhere, also inside of its head."""
    raw = request(_GOOD, headers=(_JSON,))
    return Case("cut", raw[: rng.randrange(1, len(raw))], may_be_silent=True)


_HTTP: tuple[Callable[[Random], Case], ...] = (
    *(_headers, _headers, _lengths, _chunked, _targets, _targets, _pipelined, _cut),
)
