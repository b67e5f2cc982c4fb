"""Interceptors of every tasuki.v1 call: request id, deadline, log line, metrics, errors.

From the outside in: metrics see every call, the log line every outcome, the error mapping every exception of a handler. The caller is
checked next, before any message is read. This is the only place with `except Exception`.
"""

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tasuki.config.schema import CallerRole
from tasuki.rpc.access import LOCAL_ACCESS, Access, FleetFence
from tasuki.rpc.logs import RateLimitedLog
from tasuki.rpc.methods import METHODS, Method, standard_methods, unknown_method
from tasuki.rpc.metrics import CallMetrics
from tasuki.wire.errors import DeadlineRequired, InternalError, InvalidArgument, TasukiError, Unauthenticated, to_status
from tasuki.wire.traced_channel import REQUEST_ID_KEY, TRACEPARENT_KEY, set_status
from tasuki.wire.tracing import NO_TRACER, REQUEST_ID, SpanKind, Tracer, current

_log = logging.getLogger("tasuki.rpc")
_Context = grpc.aio.ServicerContext[Any, Any]
# Those of a changeover get a span only below a span of the caller, and reads, which are polled, none.
_BEGIN_TRACES = (CallerRole.TRAINER, CallerRole.OPERATOR)


@dataclass(slots=True)
class _Outcome:
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str = ""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of a server. Methods in no table are refused at a port, and pass untouched at the unix socket.

    A caller is checked before the first message is read, and again before each answer of a stream, so a revoked role ends it.
    """

    def __init__(
        self, metrics: CallMetrics, fence: FleetFence, *, tracer: Tracer, refusals: RateLimitedLog, access: Access | None = None
    ) -> None:
        """access: of a port; None at the unix socket, whose callers may do everything."""
        self._metrics, self._fence, self._tracer, self._refusals = metrics, fence, tracer, refusals
        self._access = LOCAL_ACCESS if access is None else access
        self._strangers = RateLimitedLog()
        self._methods: Mapping[str, Method] = {**METHODS, **standard_methods()}
        self._refuses_unknown = access is not None

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        handler, path = await continuation(handler_call_details), handler_call_details.method
        method = self._methods.get(path) or (unknown_method(path) if self._refuses_unknown else None)
        return handler if handler is None or method is None else self._wrapped(handler, method)

    def _wrapped(self, handler: Any, method: Method) -> "grpc.RpcMethodHandler[Any, Any]":
        """Wraps the handler as a streaming one, which the server calls before a message arrives."""

        async def answers(messages: AsyncIterator[bytes], context: _Context) -> AsyncIterator[Any]:
            async with self._observed(method, context) as role:
                if method.needs_deadline and context.time_remaining() is None:
                    text = f"{method.name} changes state: call it with a deadline (grpcurl: -max-time SECONDS)"
                    raise DeadlineRequired(text)
                self._fence.check(method, context, role=role)
                request: Any = _decoded(messages, handler.request_deserializer)
                if not handler.request_streaming:
                    request = await anext(request, None)
                    if request is None:
                        raise InvalidArgument("request", "the method takes one message, and none came")
                    self._access.check_request(method, request, role=role)
                if not handler.response_streaming:
                    unary = handler.stream_unary if handler.request_streaming else handler.unary_unary
                    yield await unary(request, context)
                    return
                streaming = handler.stream_stream if handler.request_streaming else handler.unary_stream
                if inspect.iscoroutinefunction(streaming):  # the health service's Watch writes by itself
                    await streaming(request, context)
                    return
                async with aclosing(streaming(request, context)) as responses:
                    async for response in responses:
                        self._access.check(method, context)
                        yield response

        return grpc.stream_stream_rpc_method_handler(answers, response_serializer=handler.response_serializer)

    @asynccontextmanager
    async def _observed(self, method: Method, context: _Context) -> AsyncIterator[CallerRole]:
        given, outcome, started = _metadata(context, REQUEST_ID_KEY), _Outcome(), time.perf_counter()
        request_id = given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
        self._metrics.started(method)
        with self._traced(method, context, request_id=request_id, outcome=outcome):
            try:
                async with self._errors_mapped(method, context, request_id=request_id, outcome=outcome):
                    try:
                        role = self._access.check(method, context)
                    except Unauthenticated:
                        self._strangers.info("event=stranger_refused rpc=%s peer=%s", method.name, context.peer())
                        raise
                    await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
                    yield role
            finally:
                seconds = time.perf_counter() - started
                self._metrics.handled(method, code=outcome.code, seconds=seconds)
                _log.debug("rpc=%s request_id=%s code=%s seconds=%.4f", method.name, request_id, outcome.code.name, seconds)

    @contextmanager
    def _traced(self, method: Method, context: _Context, *, request_id: str, outcome: _Outcome) -> Iterator[None]:
        is_left_out = self._tracer is NO_TRACER or method.role is CallerRole.VIEWER
        parent = "" if is_left_out else _metadata(context, TRACEPARENT_KEY)
        if is_left_out or not (parent or method.role in _BEGIN_TRACES):
            yield
            return
        attributes = {"rpc.system.name": "grpc", "rpc.method": method.name, REQUEST_ID: request_id}
        span = self._tracer.begin(method.name, kind=SpanKind.SERVER, parent=parent, attributes=attributes)
        try:
            with current(span):
                yield
        finally:
            set_status(span, outcome.code)
            if outcome.reason:
                span.fail(outcome.reason)
            span.end()

    @asynccontextmanager
    async def _errors_mapped(self, method: Method, context: Any, *, request_id: str, outcome: _Outcome) -> AsyncIterator[None]:
        try:
            yield
        except TasukiError as error:
            outcome.code, outcome.reason = error.code, error.reason
            if not isinstance(error, Unauthenticated):  # logged apart, so that strangers leave room for callers
                text = "rpc=%s request_id=%s reason=%s message=%.1000s"
                self._refusals.info(text, method.name, request_id, error.reason, error.message)
            await _abort(context, error)
        except grpc.aio.AbortError:  # of the health service, which has told its caller
            outcome.code = next(code for code in grpc.StatusCode if code.value[0] == context.code())
            raise
        except grpc.aio.BaseError:  # the caller is gone, or the server stops
            outcome.code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from None
        except (asyncio.CancelledError, GeneratorExit):
            outcome.code = grpc.StatusCode.CANCELLED
            raise
        except Exception:
            outcome.code = grpc.StatusCode.INTERNAL
            _log.exception("rpc=%s request_id=%s failed", method.name, request_id)
            text = f"internal error; the service's log has the traceback under request_id={request_id}"
            await _abort(context, InternalError(text, request_id=request_id))


async def _decoded(messages: AsyncIterator[bytes], decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for message in messages:
        try:
            request = decode(message)
        except DecodeError as error:
            raise InvalidArgument("request", f"is no message of this method: {error}") from error
        yield request


async def _abort(context: Any, error: TasukiError) -> None:
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:  # the caller is gone; grpcio would log a traceback for each
        raise asyncio.CancelledError from None


def _metadata(context: _Context, wanted: str) -> str:
    """Value of a metadata key; empty if the caller did not send it."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted and isinstance(value, str):
            return value
    return ""
