"""Calls that must be refused."""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
import pytest

from tasuki.wire.errors import InvalidArgument, TasukiError, from_rpc_error


async def refused(call: Awaitable[object]) -> TasukiError:
    """Returns the error with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


@contextmanager
def refusing(field: str, *, match: str = "") -> Iterator[pytest.ExceptionInfo[InvalidArgument]]:
    """Expects InvalidArgument that names `field`. match: in its text."""
    with pytest.raises(InvalidArgument, match=match) as raised:
        yield raised
    assert raised.value.metadata["field"] == field
