"""The settings of servers on Ray, and of the router in front of them."""

from ropewalk.server.ray.sent_settings import sent_settings
from ropewalk.server.settings.load import load_settings

_KEY = "a-key-of-the-router"


def test_sent_settings_do_not_print_keys() -> None:
    """Ray prints the arguments of what fails."""
    flags = {"replicas": 2, "api_key": ["of-a-client"], "kv_store": "valkey://:secret@kv:7/1"}
    sent = sent_settings(load_settings(flags), _KEY)
    assert "of-a-client" in sent.model_dump_json()
    for secret in (_KEY, "of-a-client", "secret@"):
        assert secret not in repr(sent)
