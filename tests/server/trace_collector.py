"""A collector of OpenTelemetry traces on a port of this machine, which speaks OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.server.load.soak_watch import wait_for


@dataclass(frozen=True)
class Seen:
    """One span as it arrived, with ids in hexadecimal digits and times in seconds."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began: float
    ended: float
    has_failed: bool
    facts: dict[str, Any]
    service: str


@dataclass
class Collector:
    """The spans that have arrived so far."""

    url: str
    spans: list[Seen] = field(default_factory=list)

    def trace(self, trace_id: str, num: int) -> dict[str, Seen]:
        """Wait for the spans of a trace, and return them by their names."""

        def there() -> list[Seen]:
            return [each for each in self.spans if each.trace_id == trace_id]

        assert wait_for(lambda: len(there()) >= num), there()
        assert len(there()) == num
        return {each.name: each for each in there()}


@contextmanager
def trace_collector() -> Iterator[Collector]:
    """Collect until the block ends."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/traces"
            for resource in sent.resource_spans:
                service = _facts(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    collector.spans.extend(_seen(each, service) for each in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _seen(span: Any, service: str) -> Seen:
    return Seen(
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code == 2,
        _facts(span.attributes),
        service,
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
