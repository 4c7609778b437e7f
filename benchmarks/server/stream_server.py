"""The server of `streams`: the real application over a stand-in for the engine's core.

It reads one plan a line from its standard input: streams, seconds of a step, and seconds of a step
that the engine's thread computes while it holds the interpreter lock. It writes its port once.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.request import FinishReason, Output
from ropewalk.server.log_lines import log_to_stderr
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.app import create_app
from ropewalk.server.startup.gate import access_policy_of, listening_socket
from ropewalk.server.startup.lifecycle import GracefulServer
from ropewalk.server.startup.load_service import load_service

MOST_STREAMS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of one measurement."""

    num_streams: int = 1  # the first step begins when so many requests are there
    step_s: float = 0.0
    host_s: float = 0.0  # of each step


@dataclass(slots=True)
class _Stream:
    state: RequestState
    num_generated: int = 0


class StandIn:
    """A core that gives every request one token a step; the engine's thread is the real one."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.plan = Plan()
        self.num_waiting_tokens = 0
        self._on_end = on_end
        self._live: dict[str, _Stream] = {}
        self._has_begun = False

    @property
    def is_idle(self) -> bool:
        if not self._live:
            self._has_begun = False
        return not self._has_begun and len(self._live) < self.plan.num_streams

    def add(self, state: RequestState) -> None:
        self._live[state.sequence.request.request_id] = _Stream(state)

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self._end(self._live[request_id], Output(finish_reason=FinishReason.ABORT))

    def fail_all(self, error: str) -> None:
        for stream in list(self._live.values()):
            self._end(stream, Output(finish_reason=FinishReason.ERROR, error=error))

    # A stand-in has no pages, so nothing waits for them and there is nothing to report.
    patience_s = None

    def start_lower_store(self, wake: Callable[[], None]) -> None:
        """Start nothing."""

    def close_lower_store(self, timeout_s: float) -> None:
        """Write nothing."""

    def drain(self) -> None:
        """Wait for nothing."""

    def update_gauges(self) -> None:
        """Report nothing."""

    def step(self) -> int:
        """Wait as for a GPU, compute as long as a real engine, and give each stream a token."""
        self._has_begun = True
        time.sleep(max(0.0, self.plan.step_s - self.plan.host_s))
        until = time.thread_time() + self.plan.host_s
        while time.thread_time() < until:
            pass
        streams = list(self._live.values())
        for stream in streams:
            request = stream.state.sequence.request
            stream.num_generated += 1
            output = Output(
                text=f" t{stream.num_generated}",
                token_ids=(stream.num_generated,),
                tier=request.tier_choice.tier,
            )
            if stream.num_generated == request.sampling.max_tokens:
                self._end(stream, output._replace(finish_reason=FinishReason.LENGTH))
            else:
                stream.state.on_output(output)
        return len(streams)

    def _end(self, stream: _Stream, output: Output) -> None:
        del self._live[stream.state.sequence.request.request_id]
        self._on_end()
        stream.state.on_output(output)


def stand_in_for(engine: Engine) -> StandIn:
    """Replace the core of an engine that has not started."""
    core = StandIn(engine._admission.ended)  # noqa: SLF001  # the engine has no other place for it
    engine._core = core  # type: ignore[assignment]  # noqa: SLF001
    return core


def main() -> None:
    """Serve until the standard input ends."""
    sys.setswitchinterval(0.0002)  # as server/startup/start.py does
    log_to_stderr()
    settings = load_settings(
        {
            "host": "127.0.0.1",
            "port": "0",
            "threads": 1,
            "max_num_seqs": MOST_STREAMS,
            "max_connections": 2 * MOST_STREAMS,
            "kv_cache_tokens": 8192,
        }
    )
    service, _ = load_service(settings)
    assert isinstance(service.engine, Engine)
    core = stand_in_for(service.engine)
    policy = access_policy_of(settings, None, service.max_len)
    app = create_app(service, policy)
    with listening_socket(settings) as listener:
        server = GracefulServer(settings, app, partial(_write, str(listener.getsockname()[1])))
        server.serve_model(service, app)

        def follow() -> None:
            for plan in _plans():
                core.plan = plan
                _write("ok")
            server.should_exit = True

        threading.Thread(target=follow, daemon=True).start()
        server.run(sockets=[listener])


def _plans() -> Iterator[Plan]:
    for line in sys.stdin:
        num_streams, step_s, host_s = line.split()
        yield Plan(int(num_streams), float(step_s), float(host_s))


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
