"""A completions server without a model: it streams given events with given delays."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (seconds to wait before it, what is sent)
Script = Sequence[tuple[float, str]]


def data(**fields: Any) -> str:
    """One event, with its text unescaped."""
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"


def token(text: str = "x", **fields: Any) -> str:
    """The event of one token."""
    return data(choices=[{"index": 0, "text": text, **fields}])


DONE = "data: [DONE]\n\n"


@dataclass
class SseServer:
    """The answers of the server, and the requests it got; prompt lengths count words."""

    answer: Callable[[int], Script | tuple[int, str]]  # the request's number -> stream or refusal
    tokens: list[int] | None = None  # of POST /tokenize; None: there is no such route
    models: str = '{"data": [{"id": "fake", "max_model_len": 4096}]}'
    metrics: Callable[[int], str] = lambda _: ""  # the requests so far -> GET /metrics
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_in_flight: int = 0
    in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(state: SseServer) -> Iterator[SseServer]:
    """Serve on a free port until the block ends."""

    class Handler(_Handler):
        server_state = state

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield state
        finally:
            http.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: SseServer
    disable_nagle_algorithm = True  # else events wait for one another

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer with the list of models, or with the metrics."""
        state = self.server_state
        is_metrics = self.path == "/metrics"
        self._send(200, state.metrics(len(state.bodies)) if is_metrics else state.models)

    def do_POST(self) -> None:
        """Answer with tokens, a stream, or a count."""
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(200 if state.tokens else 404, json.dumps({"tokens": state.tokens}))
        elif not body.get("stream"):
            usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": 1}
            self._send(200, json.dumps({"usage": usage}))
        else:
            with state.lock:
                number = len(state.bodies)
                state.bodies.append(body)
                state.headers.append(dict(self.headers))
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            self._stream(state.answer(number))

    def _stream(self, script: Script | tuple[int, str]) -> None:
        try:
            if isinstance(script[0], int):
                self._send(script[0], str(script[1]), {"Retry-After": "1"})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for delay_s, text in script:
                time.sleep(delay_s)
                self.wfile.write(text.encode())
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client went away, as one that has waited too long does
        finally:
            with self.server_state.lock:
                self.server_state.in_flight -= 1

    def _send(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())
