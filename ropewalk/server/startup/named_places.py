"""Checks of what settings name beside files: folder and store of pages, collector of spans, Ray.

They import nothing heavy, unless a setting asks for it.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from ropewalk.server.access.span_exporters import MissingExporterError, span_exporters
from ropewalk.server.settings.load import ServeSettings, SettingsError

if TYPE_CHECKING:
    from ropewalk.server.access.open_request import SpanSource


def check_disk(settings: ServeSettings) -> None:
    """Raise SettingsError if the folder of pages cannot be used; the engine makes an absent one.

    Only an attempt tells whether a folder can be made: root may write to /proc and makes none.
    """
    path = settings.kv_disk
    if path is None:
        return
    from ropewalk.model_runtime.engine.kv_disk.files.folder import (  # noqa: PLC0415  # rare
        FolderError,
        check_folder,
    )

    try:
        path.lstat()
        check_folder(path, create=False)
    except FileNotFoundError:
        there = next(each for each in path.absolute().parents if os.path.exists(each))  # noqa: PTH110  # it raises nothing
        try:
            os.rmdir(mkdtemp(prefix=".ropewalk", dir=there))  # noqa: PTH106
        except OSError as error:
            told = f"{there} takes no new folder ({error.strerror})"
            raise SettingsError(f"kv_disk: cannot make {path}: {told}") from None
    except OSError as error:
        raise SettingsError(f"kv_disk: cannot use {path}: {error.strerror}") from error
    except FolderError as error:
        raise SettingsError(f"kv_disk {error}") from error


def check_store(settings: ServeSettings) -> None:
    """Raise SettingsError if the client of a networked store is absent; nothing connects."""
    if settings.kv_store is None:
        return
    from ropewalk.model_runtime.engine.kv_disk.stores.store_url import (  # noqa: PLC0415  # rare
        NEEDS_CLIENT,
        parse_store_url,
    )

    if find_spec("valkey") is None:
        raise SettingsError(f"kv_store {NEEDS_CLIENT}")
    ca_file = parse_store_url(settings.kv_store).ca_file
    if ca_file is not None and not ca_file.is_file():
        raise SettingsError(f"kv_store: ssl_ca_certs must be a file, got {ca_file}")


def check_ray(settings: ServeSettings) -> None:
    """Raise SettingsError if replicas are asked for and Ray is absent; nothing is imported."""
    if settings.replicas is not None and find_spec("ray") is None:
        raise SettingsError(
            f"replicas needs Ray: pip install 'ray[serve]>=2.60', got {settings.replicas}"
        )


def check_traces(settings: ServeSettings) -> None:
    """Raise SettingsError if traces are asked for and cannot be sent; only then imports the SDK."""
    if not settings.traces:
        return
    try:
        version("opentelemetry-sdk")
        span_exporters()
        spans = spans_of(settings)
        assert spans is not None, "they are asked for"
        spans.stop()
    except PackageNotFoundError as error:
        raise SettingsError(
            "traces needs OpenTelemetry: pip install "
            "'opentelemetry-exporter-otlp-proto-http>=1.30' 'opentelemetry-sdk>=1.30'"
        ) from error
    except MissingExporterError as error:
        raise SettingsError(f"traces: {error}") from error
    except ValueError as error:  # of the SDK
        told = f"the OTEL_* variables cannot be used: {error}"
        raise SettingsError(f"traces: {told}") from error


def spans_of(settings: ServeSettings) -> "SpanSource | None":
    """Return the source of spans; None: none are asked for. Raises ValueError, as the SDK does."""
    if not settings.traces:
        return None
    from ropewalk.server.access.spans import Tracing  # noqa: PLC0415  # an extra

    return Tracing()
