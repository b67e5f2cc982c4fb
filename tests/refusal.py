"""Calls that must be refused."""

from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest

from tasuki.wire.errors import TasukiError, from_rpc_error


async def refused(call: Awaitable[object]) -> TasukiError:
    """Returns the error with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)
