"""A fleet of scripted nodes behind the real fronts, each on separate unix sockets, in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from tasuki.fleet.nodes import NodeChannels
from tasuki.rpc.server import RpcServer
from tasuki.wire.address import socket_folder, unix_target
from tasuki.wire.channel import open_channel
from tests.integration.scripted_node import ScriptedNode, scripted_node


@dataclass(frozen=True, slots=True)
class ScriptedFleet:
    nodes: list[ScriptedNode]
    channels: list[NodeChannels]
    folder: Path
    stacks: list[AsyncExitStack]

    @property
    def num_nodes(self) -> int:
        return len(self.channels)

    def all(self) -> list[NodeChannels]:
        return self.channels

    async def lose(self, rank: int) -> None:
        """Ends a node's servers and cuts the calls that run there."""
        self.nodes[rank].hang = asyncio.Event()  # Ending the node sets this event, which must not let the calls finish.
        await self.stacks[rank].aclose()


@asynccontextmanager
async def scripted_fleet(
    folder: Path, *, num_nodes: int, make: Callable[[Path], ScriptedNode] = ScriptedNode
) -> AsyncIterator[ScriptedFleet]:
    async with AsyncExitStack() as everything:
        stacks = [await everything.enter_async_context(AsyncExitStack()) for _ in range(num_nodes)]
        nodes, channels = [], []
        for rank, stack in enumerate(stacks):
            state_dir = folder / str(rank)
            state_dir.mkdir()
            nodes.append(await stack.enter_async_context(scripted_node(state_dir, make=make)))
            opened = {
                name: open_channel(unix_target(state_dir, service=name)) for name in ("coordinator", "trainer", "rollout")
            }
            for channel in opened.values():
                everything.push_async_callback(channel.close, None)
            channels.append(NodeChannels(**opened))
        yield ScriptedFleet(nodes, channels, folder, stacks)


@asynccontextmanager
async def served(
    state_dir: Path, *, service: str, add: Callable, make: Callable[[], object]
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a servicer on a separate socket."""
    socket_folder(state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    target = unix_target(state_dir, service=service)
    server = RpcServer(service=service, target=target)
    server.add(add, make(), f"tasuki.v1.{service.capitalize()}Service")
    await server.start()
    channel = open_channel(target)
    try:
        yield channel
    finally:
        await channel.close(None)
        await server.stop(grace_s=0)
