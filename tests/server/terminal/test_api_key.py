"""The API key of the commands that ask a server."""

import click
import pytest

from ropewalk.server.terminal.chat_command import chat
from ropewalk.server.terminal.top_command import top
from ropewalk.studies.bench.command import bench


@pytest.mark.parametrize("command", [chat, top, bench], ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("flags", "variable", "sent"),
    [
        ([], "first, second", "first"),
        ([], "only", "only"),
        (["--api-key", "a,b"], "first,second", "a,b"),
        ([], None, None),
    ],
)
def test_of_several_keys_in_the_variable_the_first_is_sent(
    command: click.Command,
    flags: list[str],
    variable: str | None,
    sent: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server in the same environment takes all of them. A flag is sent as it is."""
    monkeypatch.delenv("ROPEWALK_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("ROPEWALK_API_KEY", variable)
    asked = [] if command is not bench else ["http://127.0.0.1:9"]
    assert command.make_context(str(command.name), [*asked, *flags]).params["api_key"] == sent
