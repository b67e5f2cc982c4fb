"""A grpc.aio server that strangers' paths cannot end, and that tells when something else has ended it.

grpcio decodes the path of a call in the loop that serves all calls. A path that is not UTF-8 raises there: the loop ends, the listener
closes, and the process may crash. Strangers choose the path of unregistered methods only, so those never reach the loop. Delete
`_Loop._request_call` when grpcio fails the one call alone.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc._cython import cygrpc as _cygrpc

if TYPE_CHECKING:
    from grpc.aio import Server
else:
    from grpc.aio._server import Server

cygrpc: Any = _cygrpc  # its stub knows a part of it
CALL_ENDED: tuple[type[Exception], ...] = (cygrpc.ExecuteBatchError, cygrpc._ServerStoppedError)
"""Errors of sending to a caller that is gone or past its deadline, and after the server's end."""
Options = list[tuple[str, int | str]]


class NamedServer(Server):
    """Serves registered methods only. `add_..._to_server` of generated code registers those of a service."""

    def __init__(self, interceptor: grpc.aio.ServerInterceptor, options: Options, *, max_calls: int | None = None) -> None:
        """max_calls: served at once; grpcio refuses further ones, which a client takes for BUSY."""
        self._loop = cygrpc.get_working_loop()
        arguments = (self._loop, None, (), (interceptor,), tuple(options), max_calls)
        try:
            self._server = _Loop(*arguments)
        except TypeError:  # grpcio above 1.85 also asks whether to use xDS
            self._server = _Loop(*arguments, False)
        self._server.ended = self._loop.create_future()

    @property
    def ended(self) -> asyncio.Future[BaseException]:
        """Done with what has ended the loop, when something has."""
        return self._server.ended

    async def stop(self, grace: float | None = None) -> None:
        """Lets running calls end for `grace` seconds, and cancels the rest."""
        if self.ended.done():
            with suppress(Exception):  # grpcio raises again what has ended the loop, once, and does nothing more
                await super().stop(None)
        await super().stop(grace)


class _Loop(cygrpc.AioServer):
    """grpcio's server below grpc.aio's."""

    ended: asyncio.Future[BaseException]

    async def _request_call(self) -> Any:
        """Answers calls of unregistered methods. Never returns one."""
        answers = set[asyncio.Task[None]]()
        while True:
            call = await super()._request_call()
            answer = asyncio.create_task(_refuse(call))
            answers.add(answer)
            answer.add_done_callback(answers.discard)

    def _serving_task_crash_handler(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.ended.done():
            self.ended.set_result(error)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(grpc.aio.AbortError, *CALL_ENDED):  # told, or the caller is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service has no such method")
