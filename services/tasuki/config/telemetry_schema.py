"""The table of a node's trace exporter."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from tasuki.config.table import Schema


def _check_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError('must be an OTLP/HTTP endpoint, such as "http://127.0.0.1:4318"')
    return endpoint


class TelemetryConfig(Schema):
    """OpenTelemetry spans of RPCs, changeovers and stages; needs the extra `otel`. See docs/tracing.md."""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = None
    """OTLP/HTTP endpoint, such as "http://127.0.0.1:4318"; none by default. If it does not answer, spans are dropped and the run is not
    delayed."""
