"""Calls to every node of a fleet, and the interpretation of their errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from tasuki.fleet.nodes import NodeChannels
from tasuki.wire.errors import PeerUnavailable, TasukiError, from_reason, from_rpc_error

_Answer = TypeVar("_Answer")


class Nodes(Protocol):
    """All nodes of a fleet, as in FleetNodes."""

    @property
    def num_nodes(self) -> int: ...

    def all(self) -> Sequence[NodeChannels]:
        """Channels by rank. Raises NotJoined and FleetEnded."""
        ...


async def on_all(nodes: Sequence[NodeChannels], call: Callable[[int, NodeChannels], Awaitable[_Answer]]) -> list[_Answer]:
    """Calls all nodes and returns their answers in order. Waits for all, so that none is running after another has failed.

    call: gets a node's rank and channels. Raises the most informative error: one reported by a node before the absence of another; among
    those the lowest node's.
    """
    calls = (_named(rank, call(rank, node)) for rank, node in enumerate(nodes))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    raise_first([answer for answer in answers if isinstance(answer, BaseException)])
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raises the first error other than a node's absence, else the first; returns if there is none."""
    for error in (*(error for error in errors if type(error) is not PeerUnavailable), *errors):
        raise error


async def _named(rank: int, call: Awaitable[_Answer]) -> _Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_of_node(rank, from_rpc_error(error)) from error


def error_of_node(rank: int, error: TasukiError) -> TasukiError:
    """Adds the node's rank to an error. A text that starts with a field's name still does."""
    field = error.metadata.get("field")
    message = error.message if field is not None else f"node {rank}: {error.message}"
    return from_reason(error.reason, message, {**error.metadata, "node": str(rank)})


def renumbered(error: TasukiError, *, field: str, positions: Sequence[int]) -> TasukiError:
    """Converts an error about `field[i]` of a node's share to the call's positions. positions: of the share in the call."""
    pattern = re.compile(rf"\b{field}\[(\d+)\]")

    def named(text: str) -> str:
        return pattern.sub(lambda found: f"{field}[{positions[int(found[1])]}]", text)

    return from_reason(error.reason, named(error.message), {key: named(value) for key, value in error.metadata.items()})
