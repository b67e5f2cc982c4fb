"""Spans: off without an endpoint, and harmless with a receiver that is away, slow or broken."""

import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tasuki.client import AsyncClient
from tasuki.rpc.logs import check_telemetry
from tasuki.wire.credentials import read_headers
from tasuki.wire.errors import InvalidArgument, NotInstalled, StageOrder
from tasuki.wire.extras import install_extras
from tasuki.wire.otel import SpanSender
from tasuki.wire.tracing import NO_TRACER, SpanKind, annotate, current_span, open_tracer, spanning
from tests.integration.port_node import write_secret
from tests.limits import limit_s, wait_for
from tests.otlp import receiving
from tests.ports import free_port
from tests.refusal import refusing


class Exporter(SpanExporter):
    """Waits for `go` before each export, and raises on request."""

    def __init__(self, *, raises: bool = False) -> None:
        self.go, self.raises = threading.Event(), raises
        self.num_exports = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_exports += 1
        self.go.wait(10)
        if self.raises:
            raise RuntimeError("broken")
        return SpanExportResult.SUCCESS


def end_spans(sender: SpanSender, number: int) -> float:
    """Seconds of the call."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(sender)
    tracer, started = provider.get_tracer("test"), time.perf_counter()
    for _ in range(number):
        tracer.start_span("work").end()
    return time.perf_counter() - started


def await_spans(sender: SpanSender, outcome: str, number: int) -> None:
    wait_for(lambda: sender.counts[outcome] >= number)


def test_without_an_endpoint_a_span_does_nothing() -> None:
    assert open_tracer(None, service="client") is NO_TRACER
    with spanning(NO_TRACER.begin("work", kind=SpanKind.INTERNAL)) as span:
        assert span.traceparent == ""
    assert current_span() is None


def test_without_the_extra_a_typed_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(NotInstalled, match=re.escape(install_extras("otel"))):
        open_tracer("http://127.0.0.1:4318", service="trainer")
    with pytest.raises(NotInstalled, match=re.escape(install_extras("otel"))):
        AsyncClient("unix:/nowhere", otlp_endpoint="http://127.0.0.1:4318")


def test_spans_come_with_parents_attributes_and_failures() -> None:
    with receiving() as receiver:
        tracer = open_tracer(receiver.endpoint, service="trainer")
        with spanning(tracer.begin("outer", kind=SpanKind.SERVER)), pytest.raises(StageOrder):
            annotate("tasuki.request_id", "r1")
            with spanning(tracer.begin("inner", kind=SpanKind.INTERNAL)):
                raise StageOrder("not now")
        tracer.close()
        inner, outer = receiver.one("inner"), receiver.one("outer")
    assert (inner.parent_id, inner.trace_id, outer.parent_id) == (outer.span_id, outer.trace_id, "")
    assert inner.is_failed and inner.attributes["tasuki.reason"] == "STAGE_ORDER"
    assert outer.attributes["tasuki.request_id"] == "r1" and not outer.is_failed
    assert inner.service == "tasuki-trainer"
    assert tracer.counts() == {"sent": 2, "failed": 0, "dropped": 0}


def test_headers_of_a_file_go_with_each_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer of-the-environment")
    headers_file = tmp_path / "otlp.headers"
    write_secret(headers_file, "# of the collector\n\nAuthorization: Bearer s3cret:1\nx-scope-orgid: lab\n")
    headers = read_headers("headers_file", headers_file)
    assert headers == {"authorization": "Bearer s3cret:1", "x-scope-orgid": "lab"}
    with receiving() as receiver:
        tracer = open_tracer(receiver.endpoint, service="trainer", headers=headers)
        tracer.begin("work", kind=SpanKind.INTERNAL).end()
        tracer.close()
    assert receiver.authorizations == {"Bearer s3cret:1": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no headers"),
        ("# none\n", "holds no headers"),
        ("authorization=Bearer s3cret\n", "line 1 of .* is no header"),
        ("a: 1\ntwo words: s3cret\n", "line 2 of .* is no header"),
        ("a: s3c\x01ret\n", "line 1 of .* is no header"),
        ("a: s3crét\n", "is not ASCII"),
    ],
)
def test_a_file_that_holds_no_headers_is_refused_without_its_content(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers_file = tmp_path / "otlp.headers"
    write_secret(headers_file, text)
    monkeypatch.setenv("TASUKI_OTLP_HEADERS_FILE", str(headers_file))
    with refusing("TASUKI_OTLP_HEADERS_FILE", match=problem) as raised:
        check_telemetry()
    assert "s3c" not in raised.value.message.replace(str(tmp_path), "")


def test_a_file_of_headers_is_missing_a_fifo_or_open_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers_file = tmp_path / "otlp.headers"
    monkeypatch.setenv("TASUKI_OTLP_HEADERS_FILE", str(headers_file))
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        check_telemetry()
    os.mkfifo(headers_file, 0o600)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        check_telemetry()
    headers_file.unlink()
    headers_file.write_text("authorization: Bearer s3cret\n")
    headers_file.chmod(0o644)
    with pytest.raises(InvalidArgument, match="is open to every user of the machine; chmod 600"):
        AsyncClient("unix:/nowhere", otlp_endpoint="http://127.0.0.1:4318", otlp_headers_file=headers_file)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "http://me:hunter2@127.0.0.1:4318", "http://127.0.0.1:4318?a=b"])
def test_an_endpoint_that_is_none_is_refused_without_its_password(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pytest.raises(InvalidArgument, match="must be an OTLP/HTTP endpoint") as refused:
        check_telemetry()
    assert refused.value.metadata["field"] == "OTEL_EXPORTER_OTLP_ENDPOINT" and "hunter2" not in refused.value.message


def test_spans_leave_as_often_as_the_sdks_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with receiving() as receiver:
        tracer, started = open_tracer(receiver.endpoint, service="trainer"), time.monotonic()
        for name in ("first", "second", "third"):
            tracer.begin(name, kind=SpanKind.INTERNAL).end()
            receiver.one(name)
        assert time.monotonic() - started < limit_s(2)
        tracer.close()


def test_a_full_queue_drops_and_counts_and_nobody_waits() -> None:
    exporter = Exporter()
    sender = SpanSender(exporter, max_waiting=8)
    assert end_spans(sender, 5000) < 5
    exporter.go.set()
    sender.shutdown()
    await_spans(sender, "sent", 8)
    assert sender.counts["dropped"] + sender.counts["sent"] == 5000
    assert sender.counts["dropped"] > 4000


def test_an_exporter_that_raises_is_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter(raises=True)
    exporter.go.set()
    sender = SpanSender(exporter)
    end_spans(sender, 600)
    sender.shutdown()
    await_spans(sender, "failed", 600)
    assert caplog.text.count("event=spans_lost outcome=failed") == 1


@pytest.mark.parametrize("receiver", ["hangs", "is away", "refuses"])
def test_closing_takes_a_second_at_most_whatever_the_receiver_does(receiver: str, caplog: pytest.LogCaptureFixture) -> None:
    with receiving(hangs=receiver == "hangs", status=500) as there:
        endpoint = f"http://127.0.0.1:{free_port()}" if receiver == "is away" else there.endpoint
        tracer = open_tracer(endpoint, service="client")
        for _ in range(10):
            tracer.begin("work", kind=SpanKind.CLIENT).end()
        started = time.monotonic()
        tracer.close()
        assert time.monotonic() - started < limit_s(2)
    assert "opentelemetry" not in {record.name.partition(".")[0] for record in caplog.records}
