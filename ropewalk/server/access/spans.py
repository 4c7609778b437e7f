"""OpenTelemetry spans of a request: the whole of it, and queue, prefill and decode of each answer.

This is the only module that imports OpenTelemetry, and only the setting `traces` imports it. The
SDK reads the OTEL_* variables. Spans are made when a request begins and ends, never for a token.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import Scope

from ropewalk.model_runtime.request import FinishReason
from ropewalk.server.access.open_request import EndedAnswer, OpenRequest
from ropewalk.server.access.span_exporters import span_exporters
from ropewalk.server.version import own_version

_SERVICE = "ropewalk"  # if OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES name none
_UNNAMED = "unknown_service"  # the SDK's name for it then
_STOP_S = 3.0  # for the last spans; a collector that is gone must not delay the end
_SERVER_ERROR = 500


class Tracing:
    """The tracer of the process."""

    def __init__(self) -> None:
        """Build exporters and sampler from the OTEL_* variables. Raises MissingExporterError."""
        resource = Resource.create({"service.version": own_version()})
        if str(resource.attributes.get("service.name")).startswith(_UNNAMED):
            resource = resource.merge(Resource({"service.name": _SERVICE}))
        self._provider = TracerProvider(resource=resource)
        for each in span_exporters():
            exporter: type[SpanExporter] = each.load()
            self._provider.add_span_processor(BatchSpanProcessor(exporter()))
        self._tracer = self._provider.get_tracer(_SERVICE, own_version())

    def begin(self, scope: Scope) -> "Spans":
        """Begin the span of a request, as a child of the caller's if `traceparent` names one."""
        return Spans(self._tracer, scope)

    def stop(self) -> None:
        """Send what is left, within a few seconds."""
        stopping = threading.Thread(target=self._provider.shutdown, daemon=True)
        stopping.start()
        stopping.join(_STOP_S)


class Spans:
    """The spans of one request."""

    def __init__(self, tracer: trace.Tracer, scope: Scope) -> None:
        """Begin the request's span now."""
        self._tracer = tracer
        # Spans have the system's time, and the engine measures with the monotonic clock.
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._span = tracer.start_span(
            f"POST {scope['path']}",
            propagate.extract(Headers(scope=scope)),
            SpanKind.SERVER,
        )
        self._has_failed = False
        self._context = trace.set_span_in_context(self._span)
        self.trace_id = trace.format_trace_id(self._span.get_span_context().trace_id)

    def answer_ended(self, ended: EndedAnswer) -> None:
        """Make the spans of an answer's phases from its times."""
        self._has_failed |= ended.reason is FinishReason.ERROR
        arrived = ended.ended_at - ended.seconds
        started = ended.ended_at if ended.queue_s is None else arrived + ended.queue_s
        facts: dict[str, Any] = {
            "ropewalk.rope_type": ended.tier.profile.name,
            "ropewalk.factor": ended.tier.factor,
            "ropewalk.tier": ended.tier.ceiling,
        }
        prompt_len = {"ropewalk.context_len": ended.num_prompt_tokens}
        self._phase("queue", arrived, started, {**facts, **prompt_len})
        if ended.queue_s is None:
            return
        first = ended.first_token_s
        first_token = ended.ended_at if first is None else arrived + first
        cached = {"ropewalk.cached_tokens": ended.num_cached_tokens}
        self._phase("prefill", started, first_token, {**facts, **prompt_len, **cached})
        if first is not None:
            final = {
                "ropewalk.context_len": ended.num_prompt_tokens + ended.num_generated,
                "gen_ai.usage.output_tokens": ended.num_generated,
                "gen_ai.response.finish_reasons": [ended.reason.value],
            }
            self._phase("decode", first_token, ended.ended_at, {**facts, **final})

    def request_ended(self, opened: OpenRequest, facts: Mapping[str, str | bool | None]) -> None:
        """End the request's span, with what was applied and spent."""
        told: dict[str, Any] = {
            "http.request.method": facts["method"],
            "http.route": facts["route"],
            "http.response.status_code": opened.status,
            "ropewalk.request_id": facts["request_id"],
            "ropewalk.key": facts["key"],
            "ropewalk.aborted": facts["aborted"],
            "gen_ai.request.model": opened.deployment,
        }
        if opened.tier is not None:
            told |= {
                "ropewalk.rope_type": opened.tier.profile.name,
                "ropewalk.factor": opened.tier.factor,
                "ropewalk.tier": opened.tier.ceiling,
                "ropewalk.beyond_trained_length": opened.is_beyond,
                "ropewalk.context_len": opened.num_prompt_tokens + opened.num_generated,
                "ropewalk.cached_tokens": opened.num_cached_tokens,
                "gen_ai.usage.input_tokens": opened.num_prompt_tokens,
                "gen_ai.usage.output_tokens": opened.num_generated,
            }
        self._span.set_attributes(
            {name: value for name, value in told.items() if value is not None}
        )
        if self._has_failed or opened.status >= _SERVER_ERROR:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _phase(self, name: str, began: float, ended: float, facts: dict[str, Any]) -> None:
        """Make a span from two times of time.monotonic()."""
        span = self._tracer.start_span(
            name, self._context, attributes=facts, start_time=self._ns(began)
        )
        span.end(self._ns(ended))

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset_ns
