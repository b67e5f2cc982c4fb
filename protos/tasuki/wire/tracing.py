"""Spans of calls and changeovers. Without an endpoint they cost nothing and import nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

import grpc.aio

from tasuki.wire.errors import NotInstalled, TasukiError
from tasuki.wire.extras import install_extras

REQUEST_ID = "tasuki.request_id"
"""Attribute that links spans, log lines and journal entries."""
CHANGEOVER_ID = "tasuki.changeover_id"
NODE_RANK = "tasuki.node_rank"
"""Attribute of processes in a fleet."""
REASON = "tasuki.reason"


class SpanKind(StrEnum):
    """The side of a call that a span covers."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(Protocol):
    """A piece of work in progress."""

    @property
    def traceparent(self) -> str:
        """W3C trace context for its children; empty if tracing is off."""
        ...

    def set(self, name: str, value: str | int) -> None: ...

    def fail(self, reason: str) -> None:
        """Marks the span as failed."""
        ...

    def end(self) -> None: ...


class Tracer(Protocol):
    """Creates spans. Its methods never block and never raise."""

    def begin(self, name: str, *, kind: SpanKind, parent: str = "", attributes: Mapping[str, str | int] | None = None) -> Span:
        """Starts a span under `parent`, a W3C traceparent, or else under the current span."""
        ...

    def wrap(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Wraps a channel to create a span for each call that changes something."""
        ...

    def link(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Wraps a channel to put each call that changes something below the current span, without a span for the call."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Number of spans by outcome: sent, failed or dropped. Empty if tracing is off."""
        ...

    def close(self) -> None:
        """Flushes the remaining spans for at most a second. Blocks."""
        ...


_CURRENT: ContextVar[Span | None] = ContextVar("tasuki_span", default=None)


def current_span() -> Span | None:
    return _CURRENT.get()


@contextmanager
def current(span: Span) -> Iterator[None]:
    """Makes `span` the current one within the block."""
    token = _CURRENT.set(span)
    try:
        yield
    finally:
        with suppress(ValueError):  # a stream closed by another task
            _CURRENT.reset(token)


@contextmanager
def spanning(span: Span) -> Iterator[Span]:
    """Makes `span` the current one and ends it with the block. An exception marks it as failed."""
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
    """Sets an attribute of the current span, if any."""
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

    def link(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        return channel

    def counts(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


NO_TRACER: Tracer = _NoTracer()


def open_tracer(
    endpoint: str | None, *, service: str, headers: Mapping[str, str] | None = None, node_rank: int | None = None
) -> Tracer:
    """Opens a tracer that exports by OTLP over HTTP; without an endpoint, one that does nothing.

    endpoint: e.g. "http://127.0.0.1:4318". service: sets `service.name` to "tasuki-SERVICE". headers: sent with each export; None leaves
    them to the SDK's variables. node_rank: of a node in a fleet. Raises NotInstalled without OpenTelemetry.
    """
    if endpoint is None:
        return NO_TRACER
    check_tracing_installed(endpoint)
    from tasuki.wire.otel import OtelTracer

    return OtelTracer(endpoint, service=service, headers=headers, node_rank=node_rank)


def check_tracing_installed(endpoint: str | None) -> None:
    """Raises NotInstalled if an endpoint is set and OpenTelemetry is missing."""
    if endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        text = f"spans need OpenTelemetry: {install_extras('otel')}"
        raise NotInstalled(text, packages="opentelemetry", extras="otel") from error
