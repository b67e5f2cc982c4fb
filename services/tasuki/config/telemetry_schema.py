"""Where a node sends its spans."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from tasuki.config.table import Schema


def _check_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError('must be the address of an OTLP receiver over HTTP, such as "http://127.0.0.1:4318"')
    return endpoint


class TelemetryConfig(Schema):
    """Spans of RPCs, changeovers and stages by OpenTelemetry, from the extra `otel`; see docs/tracing.md."""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = None
    """OTLP receiver over HTTP, such as "http://127.0.0.1:4318"; none by default. Spans are lost, and the run is not slowed, while it does
    not answer."""
