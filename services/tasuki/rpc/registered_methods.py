"""Refuses calls of unregistered methods before grpcio decodes their paths.

A path that is not UTF-8 raises in the loop that serves all calls of grpcio's server and ends it; only paths of unregistered methods can be
such. Delete this when grpcio fails the one call alone. A grpcio without this hook ends on such a path, and the service with it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc as _cygrpc

cygrpc: Any = _cygrpc  # its stub knows a part of it


class _RegisteredMethods(cygrpc.AioServer):
    async def _request_call(self) -> Any:
        """Answers calls of unregistered methods. Never returns one."""
        answers = set[asyncio.Task[None]]()
        while True:
            call = await super()._request_call()
            answer = asyncio.create_task(_refuse(call))
            answers.add(answer)
            answer.add_done_callback(answers.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with suppress(grpc.aio.AbortError, grpc.aio.BaseError):  # told, or the caller is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service has no such method")


def refuse_unregistered_methods() -> None:
    """Applies to every server that this process makes from now on."""
    cygrpc.AioServer = _RegisteredMethods
