"""A process's tracer, by `[telemetry]`."""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.config.schema import NodeConfig
from tasuki.config.telemetry_schema import TelemetryConfig
from tasuki.wire.credentials import read_headers
from tasuki.wire.tracing import Tracer, check_tracing_installed, open_tracer


def open_service_tracer(config: NodeConfig, *, service: str) -> Tracer:
    """Opens the tracer of a service; without an endpoint, one that does nothing. Raises as `check_telemetry`."""
    telemetry = config.telemetry
    return open_tracer(telemetry.endpoint, service=service, headers=_headers(telemetry), node_rank=config.node_rank)


def check_telemetry(telemetry: TelemetryConfig) -> None:
    """Raises NotInstalled if an endpoint is set and OpenTelemetry is missing, and InvalidArgument for an unusable file of headers."""
    check_tracing_installed(telemetry.endpoint)
    _headers(telemetry)


def _headers(telemetry: TelemetryConfig) -> Mapping[str, str] | None:
    path = telemetry.headers_file
    return None if path is None else read_headers("telemetry.headers_file", path)
