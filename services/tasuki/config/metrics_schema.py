"""Where Prometheus scrapes a node."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from tasuki.config.table import Schema
from tasuki.wire.address import split_host_port


def _check_address(listen: str) -> str:
    split_host_port(listen)
    return listen


class MetricsConfig(Schema):
    """One address for the metrics of all services; see docs/metrics.md."""

    listen: Annotated[str, AfterValidator(_check_address)] | None = None
    """Where the coordinator answers GET /metrics, such as "127.0.0.1:9464"; none by default. Every user of the machine may read it on
    loopback. Beyond loopback it has the TLS and the callers of `[security]`, each at least a viewer."""
