"""The way of a server's error to the command, without a cluster."""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.server.ray.command import _start_error
from ropewalk.server.ray.server_replica import ServerReplica
from ropewalk.server.sentences import HINT
from ropewalk.server.settings.load import SettingsError


async def _error_of(lines: list[str], code: int) -> Exception:
    """The error of a replica whose server tells these lines and ends with the code."""
    told = "".join(json.dumps({"failed": line}) + "\n" for line in lines)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"import sys; print({told!r}, end=''); sys.exit({code})"),
        stdout=asyncio.subprocess.PIPE,
    )
    replica: Any = SimpleNamespace(_process=process)
    with pytest.raises((SettingsError, RuntimeError)) as raised:
        await ServerReplica._started(replica)
    return raised.value


def _as_ray_tells(error: Exception) -> SimpleNamespace:
    kind = f"{type(error).__module__}.{type(error).__name__}"
    message = f"The deployment failed to start.\nTraceback:\n  File x\n{kind}: {error}\n"
    return SimpleNamespace(deployments={"Server": SimpleNamespace(message=message)}, message="")


@pytest.mark.parametrize(
    ("lines", "code", "kind", "told"),
    [
        (["port: wrong", "host: wrong"], 2, SettingsError, "port: wrong; host: wrong"),
        (["unexpected OSError: full", HINT], 1, RuntimeError, "unexpected OSError: full"),
        ([], 7, RuntimeError, "the server ended with code 7"),
    ],
)
def test_a_start_that_fails_keeps_all_its_lines_and_its_kind(
    lines: list[str], code: int, kind: type[Exception], told: str
) -> None:
    """The hint of the server's own command is left out."""
    error = _start_error(_as_ray_tells(asyncio.run(_error_of(lines, code))))
    assert type(error) is kind
    assert str(error) == f"the replicas did not start: {told}"
