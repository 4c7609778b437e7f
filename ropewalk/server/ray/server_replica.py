"""One plain server as a replica of Ray Serve: its process, its health and its load.

Ray makes an instance in a process of its own and calls its methods. The server is a child of that
process, so nothing of Ray is in it. Requests come to the server itself, not through Ray.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

import ray
import structlog

from ropewalk.server.access.assigned_ids import KEY_HEADER
from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.ray.autoscale import load_of
from ropewalk.server.router.upstream import LostError, Pool, Target
from ropewalk.server.sentences import DIED, HINT, USAGE_ERROR
from ropewalk.server.settings.load import TRACEBACK_VARIABLE, ServeSettings, SettingsError
from ropewalk.server.settings.problems import ENV_PREFIX
from ropewalk.server.settings.route_settings import SILENCE_S

_STILL_S = 2 * SILENCE_S  # without a word; then a server stands still
_STEP_TOKENS = 2048  # the least of the defaults; the device is not known here
_FAREWELL_S = 8.0  # for the server to end, after the time that running requests have

_DRAINING = b'"draining"'  # the code in the body of /ready

_log = structlog.get_logger(__name__)


class ServerReplica:
    """Starts a server, tells its address, and ends with it."""

    async def __init__(self, settings: ServeSettings, host: str | None) -> None:  # type: ignore[misc]  # Ray awaits it
        """Return when the server is ready. Raises what `_started` raises.

        `host`: the address that it listens on; None: that of this node.
        """
        log_to_stderr(settings.log_format, settings.log_level)
        self._settings = settings
        self._is_ending = False
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "ropewalk.server.ray.server_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(settings.threads),
            start_new_session=True,  # signals of a terminal are for the command
        )
        stated = settings.model_dump(mode="json", exclude_unset=True)
        stated["host"] = host or _own_address()
        assert self._process.stdin is not None
        # It stays open: the server ends when it closes.
        self._process.stdin.write(json.dumps(stated).encode() + b"\n")
        self._url, self._banner = await self._started()
        self._pool = Pool(Target.of(self._url), None, 2 * _STILL_S)
        self._ending = asyncio.ensure_future(self._end_with_it())

    async def _started(self) -> tuple[str, str]:
        """Return the server's address and banner.

        Raises SettingsError if it refuses its settings or model, and RuntimeError if it fails
        otherwise, in one line: Ray passes errors on as text, of which the command reads the last.
        """
        assert self._process.stdout is not None
        failed = []
        async for line in self._process.stdout:
            told = json.loads(line)
            if "url" in told:
                return told["url"], told["banner"]
            failed.append(told["failed"])
        code = await self._process.wait()
        why = "; ".join(line for line in failed if line != HINT)
        error = SettingsError if code == USAGE_ERROR else RuntimeError
        raise error(why or f"the server ended with code {code}")

    async def banner(self) -> str:
        return self._banner

    async def record_replica_metadata(self) -> dict[str, str]:
        """Return the address, for the router. Ray calls it when this is ready."""
        return {"url": self._url}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load, for the autoscaler (`autoscale.py`). Ray calls it regularly."""
        _, page = await self._get("/metrics")
        return {"load": load_of(page, self._settings.max_num_batched_tokens or _STEP_TOKENS)}

    async def check_health(self) -> None:
        """Raise RuntimeError if the server is not well. Ray calls it regularly.

        A server that stands still is killed. Its requests have gone on elsewhere by then, and it
        would keep its processors or its GPU.
        """
        try:
            async with asyncio.timeout(_STILL_S):
                status, body = await self._get("/ready")
        except TimeoutError:
            _log.error("server_stands_still")
            self._process.kill()
            raise RuntimeError(f"the server says nothing for {_STILL_S:g} s") from None
        except LostError as error:
            raise RuntimeError(f"the server cannot be reached: {error}") from error
        # One that drains ends by itself, and its streams end before.
        if status != 200 and _DRAINING not in body:
            raise RuntimeError(f"its /ready answers {status}: {body!r}")

    async def __del__(self) -> None:
        """Let the server's requests end, and end it."""
        self._is_ending = True
        process: asyncio.subprocess.Process | None = getattr(self, "_process", None)
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._settings.shutdown_timeout_seconds + _FAREWELL_S):
                await process.wait()
        except TimeoutError:
            process.kill()

    async def _end_with_it(self) -> None:
        """End this process when the server ends; another replica takes its place at once."""
        code = await self._process.wait()
        if not self._is_ending:
            _log.error("server_ended", code=code)
            os._exit(DIED)

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises LostError."""
        headers = [(KEY_HEADER.encode(), str(self._settings.router_key).encode())]
        exchange = await self._pool.request("GET", path, headers)
        try:
            return exchange.status, await exchange.whole()
        finally:
            self._pool.release(exchange)


def _own_address() -> str:
    """Return the address of this node, as other nodes know it."""
    here = ray.get_runtime_context().get_node_id()
    found = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
    return str(next(found))


def _environment(num_threads: int | None) -> Mapping[str, str]:
    """Return the environment of a server, whose settings come from elsewhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(ENV_PREFIX) or name == TRACEBACK_VARIABLE
    }
    return {**kept, "OMP_NUM_THREADS": str(num_threads)}  # Ray sets another number
