"""Serves GET /metrics at the node's address: plain on loopback, elsewhere with TLS and the callers of [security]."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from tasuki.config.schema import NodeConfig
from tasuki.rpc.http_port import HttpCaller, HttpHandler, HttpPort
from tasuki.rpc.methods import METHODS
from tasuki.wire.address import is_beyond_loopback
from tasuki.wire.errors import PermissionDenied, TasukiError, Unauthenticated

_log = logging.getLogger("tasuki.coordinator")
_METHOD = METHODS["/tasuki.v1.MetricsService/GetMetrics"]
"""Method whose callers may also scrape."""
_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 5.0
Text = Callable[[], Coroutine[Any, Any, bytes]]


async def serve_metrics(config: NodeConfig, text: Text) -> None:
    """Serves until cancelled. An address in use is retried; meanwhile the node only lacks metrics."""
    assert config.metrics.listen is not None
    server, is_told = None, False
    while server is None:
        try:
            server = MetricsServer(config, config.metrics.listen, text, loop=asyncio.get_running_loop())
        except (OSError, TasukiError) as error:
            if not is_told:
                _log.error("event=metrics_not_served listen=%s error=%s", config.metrics.listen, error)
            is_told = True
            await asyncio.sleep(_RETRY_S)
    thread = threading.Thread(target=server.serve_forever, name="tasuki-metrics", daemon=True)
    thread.start()
    _log.info("event=metrics_served listen=%s tls=%s", config.metrics.listen, server.tls is not None)
    try:
        await asyncio.Event().wait()
    finally:
        server.shutdown()
        server.server_close()


class MetricsServer(HttpPort):
    """Answers with the text of the node's metrics."""

    def __init__(self, config: NodeConfig, listen: str, text: Text, *, loop: asyncio.AbstractEventLoop) -> None:
        """Binds the address. Raises OSError if it is unavailable, InvalidArgument naming a key of [security] whose file cannot be used."""
        self._text, self._loop = text, loop
        super().__init__(listen, _Handler, guard=config if is_beyond_loopback(listen) else None)

    def text(self) -> bytes:
        """Text of the metrics, made in the event loop; called from a connection's thread. Raises TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(self._text(), self._loop)
        try:
            return future.result(_ANSWER_TIMEOUT_S)
        except FutureTimeoutError:
            future.cancel()
            raise


class _Handler(HttpHandler):
    def reply(self) -> None:
        server = self.server
        assert isinstance(server, MetricsServer)
        if self.path.partition("?")[0] != "/metrics":
            self.answer(HTTPStatus.NOT_FOUND, b"see /metrics\n")
            return
        try:
            if server.access is not None:
                server.access.check(_METHOD, HttpCaller(self))
            self.answer(HTTPStatus.OK, server.text(), CONTENT_TYPE_LATEST)
        except (Unauthenticated, PermissionDenied) as error:
            status = HTTPStatus.UNAUTHORIZED if isinstance(error, Unauthenticated) else HTTPStatus.FORBIDDEN
            self.answer(status, f"{error.message}\n".encode())
        except TimeoutError:
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the coordinator is busy\n")
