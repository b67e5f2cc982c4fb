"""A process's tracer, by the variables of its environment."""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.config.environment import OTLP_HEADERS, otlp_endpoint, otlp_headers_file
from tasuki.config.schema import NodeConfig
from tasuki.wire.credentials import read_headers
from tasuki.wire.tracing import Tracer, check_tracing_installed, open_tracer


def open_service_tracer(config: NodeConfig, *, service: str) -> Tracer:
    """Opens the tracer of a service; without an endpoint, one that does nothing. Raises as `check_telemetry`."""
    return open_tracer(otlp_endpoint(), service=service, headers=_headers(), node_rank=config.node_rank)


def check_telemetry() -> None:
    """Raises NotInstalled if an endpoint is set and OpenTelemetry is missing, and InvalidArgument for an unusable variable or file."""
    check_tracing_installed(otlp_endpoint())
    _headers()


def _headers() -> Mapping[str, str] | None:
    path = otlp_headers_file()
    return None if path is None else read_headers(OTLP_HEADERS, path)
