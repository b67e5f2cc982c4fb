"""OpenTelemetry spans, exported by OTLP over HTTP. Imported only by `open_tracer`; the libraries are the extra `otel`."""

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping

import grpc.aio
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tasuki.wire.traced_channel import TRACEPARENT_KEY, LinkedChannel, TracedChannel
from tasuki.wire.tracing import NODE_RANK, REASON, REQUEST_ID, Span, SpanKind, current_span

_log = logging.getLogger("tasuki.wire")
_MAX_WAITING = 2048
_BATCH = 256
_EVERY_S, _MAX_EVERY_S = 5.0, 3600.0
_EXPORT_TIMEOUT_S = 10.0
_CLOSE_S = 1.0
_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}


class OtelTracer:
    """A tracer with a private provider, so that it does not affect a program's own OpenTelemetry setup."""

    def __init__(
        self, endpoint: str, *, service: str, headers: Mapping[str, str] | None = None, node_rank: int | None = None
    ) -> None:
        url, sent = f"{endpoint.rstrip('/')}/v1/traces", None if headers is None else dict(headers)
        exporter = trace_exporter.OTLPSpanExporter(url, headers=sent, timeout=_EXPORT_TIMEOUT_S)
        named = {} if node_rank is None else {NODE_RANK: node_rank}
        resource = Resource.create({"service.namespace": "tasuki", "service.name": f"tasuki-{service}", **named})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        delay = os.environ.get(OTEL_BSP_SCHEDULE_DELAY)  # noqa: TID251  read by OpenTelemetry too, not by tasuki
        self._sender = SpanSender(exporter, every_s=schedule_delay_s(delay))
        provider.add_span_processor(self._sender)
        self._tracer = provider.get_tracer("tasuki")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, *, kind: SpanKind, parent: str = "", attributes: Mapping[str, str | int] | None = None) -> Span:
        above = current_span()
        if parent:
            context = self._propagator.extract({TRACEPARENT_KEY: parent})
        elif isinstance(above, OtelSpan):
            context = above.context
        else:
            context = None  # a child of the program's current span, or else a root
        return OtelSpan(self._tracer.start_span(name, context=context, kind=_KINDS[kind], attributes=attributes))

    def wrap(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        return TracedChannel(channel, self._begin_call)

    def link(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        return LinkedChannel(channel)

    def _begin_call(self, name: str, request_id: str) -> Span:
        known = {REQUEST_ID: request_id} if request_id else {}
        return self.begin(name, kind=SpanKind.CLIENT, attributes={"rpc.system.name": "grpc", "rpc.method": name, **known})

    def counts(self) -> Mapping[str, int]:
        return dict(self._sender.counts)

    def close(self) -> None:
        self._sender.shutdown()


class OtelSpan:
    """A `Span` of the SDK. context: what its children in this process begin with."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self.context = trace.set_span_in_context(span)

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, name: str, value: str | int) -> None:
        self._span.set_attribute(name, value)

    def fail(self, reason: str) -> None:
        self._span.set_attribute(REASON, reason)
        self._span.set_status(trace.StatusCode.ERROR, reason)

    def end(self) -> None:
        self._span.end()


def schedule_delay_s(given: str | None) -> float:
    """Seconds of the SDK's variable, which is in milliseconds. As for the SDK, a value that is no positive integer counts as unset."""
    milliseconds = int(given) if given and given.isdecimal() else 0
    return min(milliseconds / 1e3, _MAX_EVERY_S) if milliseconds else _EVERY_S


class SpanSender(SpanProcessor):
    """Exports ended spans from a thread. Drops and counts spans beyond its queue; the SDK would log each drop and count none.

    The thread sleeps until a batch is full or due: waking it for each span would interrupt the work that the span measures.
    """

    def __init__(self, exporter: SpanExporter, *, max_waiting: int = _MAX_WAITING, every_s: float = _EVERY_S) -> None:
        self.counts: Counter[str] = Counter(sent=0, failed=0, dropped=0)
        self._exporter, self._max_waiting, self._every_s = exporter, max_waiting, every_s
        self._waiting: deque[ReadableSpan] = deque()
        self._is_due = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="otel-spans", daemon=True)
        self._is_closed = False
        self._has_warned = False
        trace_exporter._logger.addFilter(self._is_of_others)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._waiting) >= self._max_waiting:
            self.counts["dropped"] += 1
            self._warn("dropped")
            return
        self._waiting.append(span)
        if len(self._waiting) >= _BATCH:
            self._is_due.set()

    def shutdown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._is_due.set()
        self._thread.join(_CLOSE_S)

    def _send_all(self) -> None:
        """Runs until closed. A daemon thread: a receiver that hangs cannot keep the process alive."""
        is_last = False
        while not is_last:
            self._is_due.wait(self._every_s)
            self._is_due.clear()
            is_last = self._is_closed
            while self._waiting:
                self._send([self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))])
        self._exporter.shutdown()
        trace_exporter._logger.removeFilter(self._is_of_others)

    def _send(self, batch: list[ReadableSpan]) -> None:
        outcome = "sent" if self._is_sent(batch) else "failed"
        self.counts[outcome] += len(batch)
        if outcome == "failed":
            self._warn(outcome)

    def _is_sent(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001  whatever an exporter raises
            return False

    def _warn(self, outcome: str) -> None:
        """Logged once per process; the counters have the rest."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("event=spans_lost outcome=%s; tasuki_spans_total counts them", outcome)

    def _is_of_others(self, record: logging.LogRecord) -> bool:
        """Filters out the exporter's log of each failure, since failures are counted."""
        return record.thread != self._thread.ident
