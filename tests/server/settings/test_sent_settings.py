"""The settings of servers on Ray, and of the router in front of them."""

import pytest

from ropewalk.server.ray.sent_settings import route_settings_of, sent_settings
from ropewalk.server.settings.load import load_settings

_KEY = "a-key-of-the-router"


@pytest.mark.parametrize(
    ("stated", "of_one", "of_all"),
    [
        ({}, 32 * 2**20, 2**30),
        ({"max_body_bytes": 2**33}, 2**33, 2**35),
        ({"max_body_bytes": 2**20}, 2**20, 2**30),
        ({"max_total_body_bytes": 2**20}, 2**20, 2**20),
        ({"max_body_bytes": 2**20, "max_total_body_bytes": 2**21}, 2**20, 2**21),
    ],
)
def test_the_router_takes_every_body_limit_of_serve(
    stated: dict[str, int], of_one: int, of_all: int
) -> None:
    """A body that never fits is too large, and is not sent again later."""
    found = route_settings_of(load_settings({"replicas": 2, **stated}), _KEY)
    assert (found.max_body_bytes, found.max_total_body_bytes) == (of_one, of_all)


def test_a_head_at_the_limits_of_the_router_fits_the_server() -> None:
    """The router adds its key and the identity of the answer."""
    settings = load_settings({"replicas": 2, "max_header_bytes": 2048})
    behind = sent_settings(settings, _KEY)
    edge = route_settings_of(settings, _KEY)
    assert behind.max_header_bytes >= edge.max_header_bytes + 1024


def test_sent_settings_do_not_print_keys() -> None:
    """Ray prints the arguments of what fails."""
    flags = {"replicas": 2, "api_key": ["of-a-client"], "kv_store": "valkey://:secret@kv:7/1"}
    sent = sent_settings(load_settings(flags), _KEY)
    assert "of-a-client" in sent.model_dump_json()
    for secret in (_KEY, "of-a-client", "secret@"):
        assert secret not in repr(sent)
