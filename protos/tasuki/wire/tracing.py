"""Spans of calls and changeovers. They cost nothing, and import nothing, unless an endpoint is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

import grpc.aio

from tasuki.wire.errors import InvalidArgument, TasukiError

REQUEST_ID = "tasuki.request_id"
"""Attribute that links spans, log lines and the journal."""
CHANGEOVER_ID = "tasuki.changeover_id"
NODE_RANK = "tasuki.node_rank"
"""Attribute of a process in a fleet."""
REASON = "tasuki.reason"


class SpanKind(StrEnum):
    """Which side of a call a span is."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(Protocol):
    """A piece of work that has begun."""

    @property
    def traceparent(self) -> str:
        """W3C trace context of its children; empty when nothing is traced."""
        ...

    def set(self, name: str, value: str | int) -> None: ...

    def fail(self, reason: str) -> None:
        """Marks the span as failed."""
        ...

    def end(self) -> None: ...


class Tracer(Protocol):
    """Makes spans. No call of it waits, and none raises."""

    def begin(self, name: str, *, kind: SpanKind, parent: str = "", attributes: Mapping[str, str | int] | None = None) -> Span:
        """Begins a span below `parent`, a W3C traceparent; without one below the current span."""
        ...

    def wrap(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """A channel with a span for each call that changes something."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Spans by what became of them: sent, failed or dropped. Empty when nothing is traced."""
        ...

    def close(self) -> None:
        """Sends what is left, for at most a second. Blocks."""
        ...


_CURRENT: ContextVar[Span | None] = ContextVar("tasuki_span", default=None)


def current_span() -> Span | None:
    return _CURRENT.get()


@contextmanager
def current(span: Span) -> Iterator[None]:
    """Makes `span` the current one in the block."""
    token = _CURRENT.set(span)
    try:
        yield
    finally:
        with suppress(ValueError):  # a stream that another task closes
            _CURRENT.reset(token)


@contextmanager
def spanning(span: Span) -> Iterator[Span]:
    """Makes `span` the current one, and ends it with the block; an error of the block is the span's."""
    try:
        with current(span):
            yield span
    except TasukiError as error:
        span.fail(error.reason)
        raise
    except BaseException as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.end()


def annotate(name: str, value: str | int) -> None:
    """Sets an attribute of the current span, if there is one."""
    span = _CURRENT.get()
    if span is not None:
        span.set(name, value)


class _NoSpan:
    traceparent = ""

    def set(self, name: str, value: str | int) -> None:
        pass

    def fail(self, reason: str) -> None:
        pass

    def end(self) -> None:
        pass


class _NoTracer:
    _span = _NoSpan()

    def begin(self, name: str, *, kind: SpanKind, parent: str = "", attributes: Mapping[str, str | int] | None = None) -> Span:
        return self._span

    def wrap(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        return channel

    def counts(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


NO_TRACER: Tracer = _NoTracer()


def open_tracer(endpoint: str | None, *, service: str, node_rank: int | None = None, key: str = "telemetry.endpoint") -> Tracer:
    """A tracer that sends to an OTLP receiver over HTTP; without an endpoint one that does nothing.

    endpoint: e.g. "http://127.0.0.1:4318". service: the spans' `service.name` is "tasuki-SERVICE". node_rank: of a fleet's node.
    Raises InvalidArgument naming `key` when OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NO_TRACER
    check_tracing_installed(endpoint, key=key)
    from tasuki.wire.otel import OtelTracer

    return OtelTracer(endpoint, service=service, node_rank=node_rank)


def check_tracing_installed(endpoint: str | None, *, key: str = "telemetry.endpoint") -> None:
    """Raises InvalidArgument naming `key` for an endpoint without the libraries of the extra `otel`."""
    if endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(key, "OpenTelemetry is not installed; install it with: pip install 'tasuki[otel]'") from error
