"""The exporters of spans that the environment asks for, found without OpenTelemetry's SDK.

So a missing one is a sentence in the first second, before the SDK and the model are loaded.
"""

import os
from importlib.metadata import EntryPoint, entry_points

_GROUP = "opentelemetry_traces_exporter"  # of the SDK and of packages with exporters
_NAMES = "OTEL_TRACES_EXPORTER"
# The first that is set counts.
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class MissingExporterError(ValueError):
    """An exporter that is asked for and not installed; the message is a sentence."""


def span_exporters() -> list[EntryPoint]:
    """Return the exporters that OTEL_TRACES_EXPORTER names, otlp by default.

    Raises MissingExporterError.

    Source: OpenTelemetry, "Environment Variable Specification".
    """
    known = {each.name: each for each in entry_points(group=_GROUP)}
    asked = os.environ.get(_NAMES, "").strip() or "otlp"
    found = []
    for each in map(str.strip, asked.split(",")):
        if each == "none":
            continue
        name = _otlp() if each == "otlp" else each
        if name not in known:
            installed = ", ".join(sorted(known)) or "none"
            raise MissingExporterError(
                f"the exporter {name!a} is not installed, which the OTEL_* variables ask for; "
                f"installed: {installed}"
            )
        found.append(known[name])
    return found


def _otlp() -> str:
    """Return the exporter of OTLP's protocol, which is `http/protobuf` by default."""
    protocols = [os.environ[name].strip() for name in _PROTOCOLS if os.environ.get(name)]
    protocol = protocols[0] if protocols else "http/protobuf"
    names = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
    return names.get(protocol, protocol)
