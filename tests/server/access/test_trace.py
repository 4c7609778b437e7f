"""The header `traceparent`, by W3C Trace Context."""

import pytest

from ropewalk.server.access.access_log import trace_id_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "header",
    [
        f"00-{TRACE}-{PARENT}-01",
        f" 00-{TRACE}-{PARENT}-00 ",
        f"cc-{TRACE}-{PARENT}-01-what-a-later-version-adds",
        f"cc-{TRACE}-{PARENT}-01",
    ],
)
def test_the_trace_id_of_a_valid_header_is_found(header: str) -> None:
    """A later version may have more fields, which are skipped."""
    assert trace_id_of(header) == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\nlevel='error'",
    ],
)
def test_an_invalid_header_is_ignored(header: str) -> None:
    """Version ff, ids of zeros, capitals, and other lengths are invalid."""
    assert trace_id_of(header) is None
