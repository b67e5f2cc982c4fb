"""The table of the node's Prometheus endpoint."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from tasuki.config.table import Schema
from tasuki.wire.address import split_host_port


def _check_address(listen: str) -> str:
    split_host_port(listen)
    return listen


class MetricsConfig(Schema):
    """One endpoint for the metrics of all services; see docs/metrics.md."""

    listen: Annotated[str, AfterValidator(_check_address)] | None = None
    """Address at which the coordinator serves GET /metrics, such as "127.0.0.1:9464"; none by default. On loopback every user of the
    machine may read it. Beyond loopback it uses the TLS and credentials of `[security]`; any role suffices. SGLang's own are named
    "sglang:..."."""
