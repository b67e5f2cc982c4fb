"""What a service tells of itself: log lines, one each, key=value, on stderr; and spans, by the variables of its environment."""

import faulthandler
import logging
import sys
import time
from collections.abc import Callable, Mapping

from tasuki.config.environment import OTLP_HEADERS, otlp_endpoint, otlp_headers_file
from tasuki.config.schema import NodeConfig
from tasuki.wire.credentials import read_headers
from tasuki.wire.tracing import Tracer, check_tracing_installed, open_tracer

_log = logging.getLogger("tasuki.rpc")
LINES_LOST = "log_lines_lost"
_AT_ONCE = 100.0
_PER_S = 5.0


class _OneLine(logging.Formatter):
    """Escapes unprintable characters in our messages, so that text of a caller cannot start a new line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name.startswith("tasuki") and not record.message.isprintable():
            shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in record.message)
            record.message = "".join(shown)
        return super().formatMessage(record)


_BY_CALLERS = ("Invalid encoding on", "ExecuteBatchError raised in core")
"""grpcio's lines that any caller can cause without end, each with a traceback: a header that is not UTF-8, and a call reset meanwhile."""


class _Lines(logging.StreamHandler):
    """Reports lost lines once there is room again, so that an audit does not count them as missing."""

    _has_lost = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._has_lost:
            self._has_lost = False
            text = f"event={LINES_LOST}"
            super().emit(logging.LogRecord("tasuki.rpc", logging.WARNING, __file__, 0, text, None, None))
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            self._has_lost = True
        else:
            super().handleError(record)


def configure_logging(service: str) -> None:
    """Sets the format once, at the start of a service's process. A crash in native code leaves every thread's Python stack on stderr."""
    faulthandler.enable(file=2)
    lines = _Lines()
    lines.addFilter(lambda record: not (record.name.startswith("grpc") and str(record.msg).startswith(_BY_CALLERS)))
    lines.setFormatter(_OneLine(f"%(asctime)s %(levelname)s service={service} logger=%(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[lines], force=True)


class RateLimitedLog:
    """Writes a hundred lines at once and five a second from then on, with the number of those left out."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._counted_at = now, now()
        self._room = _AT_ONCE
        self._num_left_out = 0

    def info(self, text: str, *args: object) -> None:
        now = self._now()
        self._room = min(_AT_ONCE, self._room + (now - self._counted_at) * _PER_S)
        self._counted_at = now
        if self._room < 1:
            self._num_left_out += 1
            return
        self._room -= 1
        if self._num_left_out:
            _log.warning("event=lines_left_out num=%d", self._num_left_out)
            self._num_left_out = 0
        _log.info(text, *args)


def open_service_tracer(config: NodeConfig, *, service: str) -> Tracer:
    """Opens the tracer of a service; without an endpoint, one that does nothing. Raises as `check_telemetry`."""
    return open_tracer(otlp_endpoint(), service=service, headers=_headers(), node_rank=config.node_rank)


def check_telemetry() -> None:
    """Raises NotInstalled if an endpoint is set and OpenTelemetry is missing, and InvalidArgument for an unusable variable or file."""
    check_tracing_installed(otlp_endpoint())
    _headers()


def _headers() -> Mapping[str, str] | None:
    path = otlp_headers_file()
    return None if path is None else read_headers(OTLP_HEADERS, path)
