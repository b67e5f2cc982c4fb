"""A minimal OTLP receiver over HTTP."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from tests.limits import limit_s


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span, with ids in hexadecimal. node_rank: of its process, in a fleet."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str | int]
    is_failed: bool
    node_rank: int | None


@dataclass
class Receiver:
    """hangs: accepts requests and never answers. status: of its answers."""

    endpoint: str = ""
    hangs: bool = False
    status: int = 200
    num_requests: int = 0
    authorizations: Counter[str | None] = field(default_factory=Counter)
    """Requests by their `authorization` header."""
    _bodies: list[bytes] = field(default_factory=list)
    _spans: list[ReceivedSpan] = field(default_factory=list)

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Decodes spans on demand, so that a benchmark's receiver costs the observed processes no time."""
        while self._bodies:
            self._spans += _read(self._bodies.pop(0))
        return self._spans

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReceivedSpan:
        """Waits for the span and returns it; exporters send about once a second."""
        deadline = time.monotonic() + limit_s(15.0)
        while not self.named(name):
            assert time.monotonic() < deadline, f"no span {name} among {[span.name for span in self.spans]}"
            time.sleep(0.05)
        (span,) = self.named(name)
        return span

    def take(self, body: bytes) -> None:
        self._bodies.append(body)


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {one.key: one.value for one in resource.resource.attributes}
        rank = about.get("tasuki.node_rank")
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {one.key: one.value.string_value or one.value.int_value for one in span.attributes}
                yield ReceivedSpan(
                    service=about["service.name"].string_value,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    attributes=attributes,
                    is_failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    node_rank=None if rank is None else rank.int_value,
                )


@contextmanager
def receiving(*, hangs: bool = False, status: int = 200) -> Iterator[Receiver]:
    receiver, released = Receiver(hangs=hangs, status=status), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.num_requests += 1
            receiver.authorizations[self.headers["Authorization"]] += 1
            if receiver.hangs:
                released.wait()
                return
            assert self.path == "/v1/traces"
            if receiver.status == 200:
                receiver.take(body)
            self.send_response(receiver.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()
