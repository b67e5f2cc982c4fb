"""The table of a node's trace exporter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

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
    headers_file: Path | None = None
    """File of HTTP headers for the endpoint, such as `authorization: Bearer ...`, one per line. Read when a process starts. Another user of
    the machine must not be able to read it."""

    @model_validator(mode="after")
    def _headers_have_an_endpoint(self) -> TelemetryConfig:
        if self.headers_file is not None and self.endpoint is None:
            raise ValueError("headers_file needs telemetry.endpoint, which receives the headers")
        return self
