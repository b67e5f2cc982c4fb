"""Channels that pass trace context and request id as metadata: with a span for each call, or below the current one."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import grpc
import grpc.aio

from tasuki.wire.tracing import Span, current_span
from tasuki.wire.wrapped_channel import WrappedChannel

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
# Polled reads that change nothing.
_READS = ("Get", "List", "Plan", "Watch")
_MAX_REQUEST_ID = 128

Begin = Callable[[str, str], Span]
"""Takes the method, such as "tasuki.v1.TrainerService/OptimStep", and the request id, possibly empty."""


class TracedChannel(WrappedChannel):
    """Traces calls that change something; reads get no spans."""

    def __init__(self, channel: grpc.aio.Channel, begin: Begin) -> None:
        super().__init__(channel)
        self._begin = begin
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self, grace: float | None = None) -> None:
        await super().close(grace)
        await asyncio.gather(*self._ending)

    def calling(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        name = path.removeprefix("/")
        if _is_read(path):
            return method

        def call(request: Any, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            first, request = _peeked(request)
            request_id = _request_id_of(first)
            span = self._begin(name, request_id)
            made = method(request, *args, metadata=(*(metadata or ()), *_context(span, request_id)), **kwargs)
            made.add_done_callback(lambda done: self._end(done, span))
            return made

        return call

    def _end(self, call: grpc.aio.Call, span: Span) -> None:
        task = asyncio.get_running_loop().create_task(_ended(call, span))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class LinkedChannel(WrappedChannel):
    """Puts calls that change something below the current span. They get no span in this process: the span covers what they do."""

    def calling(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if _is_read(path):
            return method

        def call(request: Any, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            span = current_span()
            if span is None:
                return method(request, *args, metadata=metadata, **kwargs)
            first, request = _peeked(request)
            return method(request, *args, metadata=(*(metadata or ()), *_context(span, _request_id_of(first))), **kwargs)

        return call


def _is_read(path: str) -> bool:
    return path.rpartition("/")[2].startswith(_READS)


def _context(span: Span, request_id: str) -> Iterator[tuple[str, str]]:
    """Metadata from which the callee continues the trace."""
    yield TRACEPARENT_KEY, span.traceparent
    if 0 < len(request_id) <= _MAX_REQUEST_ID and request_id.isascii() and request_id.isprintable():
        yield REQUEST_ID_KEY, request_id


async def _ended(call: grpc.aio.Call, span: Span) -> None:
    code = await call.code()  # already available
    set_status(span, code)
    span.end()


def set_status(span: Span, code: grpc.StatusCode) -> None:
    """Records the outcome of a call; any code but OK is a failure."""
    span.set("rpc.response.status_code", code.name)
    if code is not grpc.StatusCode.OK:
        span.fail(code.name)


def _peeked(request: Any) -> tuple[Any, Any]:
    """The first message, and the request to send instead. The first message of an asynchronous stream is unknown."""
    if isinstance(request, Iterator):
        first = next(request, None)
        return first, chain(() if first is None else (first,), request)
    return request, request


def _request_id_of(message: Any) -> str:
    """Request id of a request, its command or its header's command; empty if it has none."""
    for part in (message, getattr(message, "command", None), getattr(getattr(message, "header", None), "command", None)):
        found = getattr(part, "request_id", "")
        if isinstance(found, str) and found:
            return found
    return ""
