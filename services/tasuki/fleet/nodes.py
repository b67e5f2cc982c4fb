"""The nodes of a fleet, as its leader calls them: by rank, once they have joined."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from tasuki.config.schema import CoordinatorConfig, NodeConfig
from tasuki.fleet.member import check_rank
from tasuki.fleet.rules import errors_of, worst
from tasuki.rpc.access import fleet_metadata
from tasuki.rpc.port import peer_credentials
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.fleet_pb2 import FleetCommand, FleetNode
from tasuki.v1.types_pb2 import PHASE_TRAIN
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import DeadlineExceeded, FleetEnded, NotJoined, PeerUnavailable, TasukiError, from_rpc_error
from tasuki.wire.stages import Stage
from tasuki.wire.tracing import NO_TRACER, Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

_log = logging.getLogger("tasuki.fleet")
_Answer = TypeVar("_Answer")
_BEATS_PER_TIMEOUT = 5
_OLD_CALLS_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeChannels:
    """Channels to the services of one node. Calls carry the fleet's name, without which a fleet's node refuses them."""

    coordinator: grpc.aio.Channel
    trainer: grpc.aio.Channel
    rollout: grpc.aio.Channel

    async def close(self) -> None:
        for channel in (self.coordinator, self.trainer, self.rollout):
            await channel.close(_OLD_CALLS_S)


async def answered(call: Awaitable[_Answer]) -> _Answer:
    """The call's answer. Raises its error as a TasukiError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def on_all(nodes: Sequence[NodeChannels], call: Callable[[int, NodeChannels], Awaitable[_Answer]]) -> list[_Answer]:
    """Calls all nodes and returns their answers in order. Waits for all, so that none is running after another has failed.

    call: gets a node's rank and channels. Raises the worst error.
    """
    calls = (answered(call(rank, node)) for rank, node in enumerate(nodes))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    if errors := errors_of(answers):
        raise worst(errors)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


@dataclass(slots=True)
class Joined:
    """A node that has joined. times: Unix time, and of a monotonic clock, in seconds. skew_s: its clock minus this one."""

    node: FleetNode
    channels: NodeChannels
    join_time: float
    heard: float
    skew_s: float | None = None


class FleetNodes:
    """Created by the leader inside an event loop. `command` goes with every call to a node."""

    def __init__(self, config: NodeConfig, *, epoch: int, tracer: Tracer = NO_TRACER) -> None:
        """config: with a table [fleet]. epoch: of the fleet's coordinator. tracer: of the calls to nodes."""
        assert config.fleet is not None
        self.config = config.fleet
        self.command = FleetCommand(name=config.fleet.name, attempt=config.fleet.attempt, epoch=epoch)
        self._credentials = peer_credentials(config.security)
        self._tracer = tracer
        self._joined: dict[int, Joined] = {}
        self._ended: asyncio.Future[FleetEnded] = asyncio.get_running_loop().create_future()

    @property
    def num_nodes(self) -> int:
        return self.config.num_nodes

    @property
    def heartbeat_s(self) -> float:
        """Interval of the nodes' heartbeats."""
        return self.config.node_timeout_s / _BEATS_PER_TIMEOUT

    @property
    def joined(self) -> list[Joined]:
        """Joined nodes in the order of their ranks."""
        return [self._joined[rank] for rank in sorted(self._joined)]

    @property
    def error(self) -> FleetEnded | None:
        """The error that ended the fleet; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    def __getitem__(self, rank: int) -> NodeChannels:
        """Raises NotJoined for a node that has not joined, and FleetEnded after the fleet has ended."""
        self.check_lives()
        found = self._joined.get(rank)
        if found is None:
            raise NotJoined(f"node {rank} of fleet {self.config.name!r} has not joined yet", node_rank=rank)
        return found.channels

    def all(self) -> list[NodeChannels]:
        """Channels of every node, by rank. Raises as []."""
        return [self[rank] for rank in range(self.num_nodes)]

    def check_lives(self) -> None:
        """Raises FleetEnded."""
        if self.error is not None:
            raise self.error

    async def join(self, node: FleetNode) -> None:
        """Admits a node that matches the leader. Raises FleetMismatch if another start of a node has the rank, and FleetEnded."""
        self.check_lives()
        known = self._joined.get(node.node_rank)
        check_rank(node, None if known is None else known.node)
        if known is not None and known.node == node:
            known.heard = time.monotonic()
            return
        self._joined[node.node_rank] = Joined(node, self._open(node), time.time(), time.monotonic())
        _log.info("event=joined node_rank=%d coordinator=%s", node.node_rank, node.coordinator_target)
        if known is not None:
            await known.channels.close()

    def beat(self, rank: int, *, boot_id: str, skew_s: float | None = None) -> None:
        """Records a heartbeat. skew_s: the node's clock minus this one. Raises NotJoined if this start has not joined, and FleetEnded."""
        self.check_lives()
        known = self._joined.get(rank)
        if known is None or known.node.boot_id != boot_id:
            raise NotJoined(f"node {rank} has not joined since it was started; join again", node_rank=rank)
        known.heard, known.skew_s = time.monotonic(), skew_s

    def silent_s(self, joined: Joined) -> float:
        return time.monotonic() - joined.heard

    def end(self, error: TasukiError, *, node_rank: int | None = None) -> None:
        """Ends the fleet: from now on every call raises. Only the first cause is kept."""
        if not self._ended.done():
            _log.error("event=fleet_ended reason=%s message=%s", error.reason, error.message)
            rank = {} if node_rank is None else {"node_rank": node_rank}
            self._ended.set_result(
                FleetEnded(f"the fleet has ended: {error.message}; restart the job", cause=error.reason, **rank)
            )

    async def ended(self) -> FleetEnded:
        """Waits for the error that ends the fleet."""
        return await asyncio.shield(self._ended)

    async def watch_silence(self) -> None:
        """Ends the fleet if a joined node is silent for `node_timeout_s`."""
        while self.error is None:
            await asyncio.sleep(self.heartbeat_s / 2)
            for joined in self.joined:
                silent_s, rank = self.silent_s(joined), joined.node.node_rank
                if silent_s > self.config.node_timeout_s:
                    text = f"node {rank} was silent for {silent_s:.1f} s"
                    self.end(FleetEnded(text, node_rank=rank), node_rank=rank)

    async def close(self) -> None:
        for joined in self.joined:
            await joined.channels.close()

    def _open(self, node: FleetNode) -> NodeChannels:
        def channel(target: str) -> grpc.aio.Channel:
            return self._tracer.wrap(open_channel(target, credentials=self._credentials, metadata=fleet_metadata(self.command)))

        return NodeChannels(*map(channel, (node.coordinator_target, node.trainer_target, node.rollout_target)))


_MARGIN_S = 5.0
"""Lets the node's own error arrive before the deadline."""


class NodePeer:
    """A node by rank. Every call may raise TasukiError."""

    def __init__(self, nodes: FleetNodes, rank: int, config: CoordinatorConfig) -> None:
        self.rank = rank
        self._nodes, self._config = nodes, config
        self._sequence = 0

    async def look(self) -> pb.NodeState:
        """The node's state as its services report it, after running work. Commands sent earlier no longer take effect."""
        request = pb.GetStateRequest(fleet=self._command())
        with self._named():
            return (await self._stub().GetState(request, timeout=self._config.stage_timeout_s + _MARGIN_S)).state

    async def run_stage(self, stage: Stage, request_id: str) -> pb.RunStageResponse:
        """Runs the next stage of the ring."""
        request = pb.RunStageRequest(stage=stage.number, request_id=request_id, fleet=self._command())
        drain_s = self._config.drain_grace_s if stage is Stage.DRAIN else 0.0
        with self._named():
            return await self._stub().RunStage(request, timeout=self._config.stage_timeout_s + drain_s + _MARGIN_S)

    async def acquire_train(self, request_id: str) -> pb.NodeState:
        """Brings the node to TRAIN from any place."""
        request = pb.AcquireRequest(phase=PHASE_TRAIN, request_id=request_id, fleet=self._command())
        timeout_s = self._config.recovery_timeout_s + len(Stage) * self._config.stage_timeout_s
        state = pb.NodeState()
        with self._named():
            async for answer in self._stub().Acquire(request, timeout=timeout_s):
                state = answer.state
        return state

    def _stub(self) -> "CoordinatorServiceAsyncStub":
        return CoordinatorServiceStub(self._nodes[self.rank].coordinator)

    def _command(self) -> FleetCommand:
        self._sequence += 1
        command = FleetCommand(sequence=self._sequence)
        command.MergeFrom(self._nodes.command)
        return command

    @contextmanager
    def _named(self) -> "Iterator[None]":
        try:
            yield
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, PeerUnavailable | DeadlineExceeded) and "peer" not in error.metadata:
                error = type(error)(f"its coordinator did not answer: {error.message}", peer=f"node {self.rank}")
            raise error from rpc_error
