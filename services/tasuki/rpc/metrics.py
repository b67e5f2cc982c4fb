"""Prometheus metrics of gRPC calls, with the names of go-grpc-middleware, so that public dashboards work."""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from tasuki.rpc.methods import METHODS, Method

_LABELS = ("grpc_type", "grpc_service", "grpc_method")
# A stage may take minutes, a read less than a millisecond.
_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)


class CallMetrics:
    """grpc_server_started_total, grpc_server_handled_total{grpc_code} and grpc_server_handling_seconds of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter("grpc_server_started", "RPCs started on the server.", _LABELS, registry=registry)
        self._handled = Counter(
            "grpc_server_handled", "RPCs completed on the server, by status code.", (*_LABELS, "grpc_code"), registry=registry
        )
        self._handling_s = Histogram(
            "grpc_server_handling_seconds",
            "Seconds until the server completed an RPC.",
            _LABELS,
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def preset(self, service: str) -> None:
        """Shows the methods of a service at zero before their first call."""
        for method in METHODS.values():
            if method.service == service:
                self._started.labels(*_labels(method))

    def started(self, method: Method) -> None:
        self._started.labels(*_labels(method)).inc()

    def handled(self, method: Method, *, code: grpc.StatusCode, seconds: float) -> None:
        camel_case = "OK" if code is grpc.StatusCode.OK else "".join(word.capitalize() for word in code.name.split("_"))
        self._handled.labels(*_labels(method), camel_case).inc()
        self._handling_s.labels(*_labels(method)).observe(seconds)


def _labels(method: Method) -> tuple[str, str, str]:
    return method.kind, method.service, method.method
