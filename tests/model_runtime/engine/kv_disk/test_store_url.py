"""Addresses of stores: what is accepted, and what is shown of them."""

from pathlib import Path

import pytest

from ropewalk.model_runtime.engine.kv_disk.stores.store_url import StoreUrl, parse_store_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("valkey://kv", StoreUrl("valkey", "kv", 6379, 0, None, None, None)),
        ("redis://u:p%40@10.0.0.1:7/2", StoreUrl("redis", "10.0.0.1", 7, 2, "u", "p@", None)),
        ("valkeys://:p@[::1]:7", StoreUrl("valkeys", "::1", 7, 0, None, "p", None)),
        (
            "rediss://kv?ssl_ca_certs=/etc/ca.pem",
            StoreUrl("rediss", "kv", 6379, 0, None, None, Path("/etc/ca.pem")),
        ),
    ],
)
def test_an_address_has_these_parts(text: str, expected: StoreUrl) -> None:
    """Four schemes, of which two are TLS."""
    found = parse_store_url(text)
    assert found == expected
    assert found.is_tls == (found.scheme in {"valkeys", "rediss"})


@pytest.mark.parametrize(
    "text",
    [
        *("", "kv:6379", "http://kv", "valkey://", "valkey://kv:0", "valkey://kv:99999"),
        *("valkey://kv/x", "valkey://kv/-1", "valkey://kv#a", "valkey://kv?ssl_ca_certs=/a"),
        *("valkeys://kv?db=3", "valkeys://kv?ssl_ca_certs", "valkey://u:secret@kv:x", "valkey://["),
    ],
)
def test_other_addresses_are_refused_without_a_word_of_them(text: str) -> None:
    """A password may be in them."""
    with pytest.raises(ValueError, match=r"^(must be valkey://|may have the option)") as error:
        parse_store_url(text)
    assert "secret" not in str(error.value)


def test_a_password_is_not_shown() -> None:
    """Neither in the text for people nor in that for logs of the program."""
    found = parse_store_url("valkeys://user:secret@[::1]:7/3")
    assert found.shown == "valkeys://[::1]:7/3"
    assert "secret" not in repr(found)
