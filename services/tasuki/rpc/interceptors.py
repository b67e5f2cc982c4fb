"""What every tasuki.v1 call passes through: request id, deadline, log line, metrics, errors.

The order, outside in: metrics see every call, the log line every outcome, the error mapping every exception of a handler. This is the
only place with `except Exception`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tasuki.rpc.methods import METHODS, Method
from tasuki.rpc.metrics import CallMetrics
from tasuki.wire.errors import DeadlineRequired, InternalError, TasukiError, to_status

REQUEST_ID_KEY = "x-request-id"
_log = logging.getLogger("tasuki.rpc")


@dataclass(slots=True)
class _Outcome:
    code: grpc.StatusCode = grpc.StatusCode.OK


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of tasuki.v1; health and reflection go through untouched."""

    def __init__(self, metrics: CallMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = METHODS.get(handler_call_details.method)
        return handler if handler is None or method is None else self._wrapped(handler, method)

    def _wrapped(self, handler: Any, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            streaming = handler.stream_stream if handler.request_streaming else handler.unary_stream

            async def answer_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
                async with self._observed(method, context):
                    async for response in streaming(request, context):
                        yield response

            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            return make(answer_stream, **codec)

        unary = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._observed(method, context):
                return await unary(request, context)

        make_unary = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        return make_unary(answer, **codec)

    @asynccontextmanager
    async def _observed(self, method: Method, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        request_id = _request_id(context)
        outcome = _Outcome()
        started = time.perf_counter()
        self._metrics.started(method)
        try:
            async with _errors_mapped(method, context, request_id=request_id, outcome=outcome):
                await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
                if method.needs_deadline and context.time_remaining() is None:
                    raise DeadlineRequired(f"{method.name} changes state: call it with a deadline (grpcurl: -max-time SECONDS)")
                yield
        finally:
            seconds = time.perf_counter() - started
            self._metrics.handled(method, code=outcome.code, seconds=seconds)
            _log.debug("rpc=%s request_id=%s code=%s seconds=%.4f", method.name, request_id, outcome.code.name, seconds)


@asynccontextmanager
async def _errors_mapped(method: Method, context: Any, *, request_id: str, outcome: _Outcome) -> AsyncIterator[None]:
    try:
        yield
    except TasukiError as error:
        outcome.code = error.code
        _log.info("rpc=%s request_id=%s reason=%s message=%s", method.name, request_id, error.reason, error.message)
        await context.abort_with_status(to_status(error))
    except (asyncio.CancelledError, GeneratorExit):
        outcome.code = grpc.StatusCode.CANCELLED
        raise
    except Exception:
        outcome.code = grpc.StatusCode.INTERNAL
        _log.exception("rpc=%s request_id=%s failed", method.name, request_id)
        text = f"internal error; the service's log has the traceback under request_id={request_id}"
        await context.abort_with_status(to_status(InternalError(text, request_id=request_id)))


def _request_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and 0 < len(value) <= 128 and value.isprintable():
            return value
    return uuid.uuid4().hex
