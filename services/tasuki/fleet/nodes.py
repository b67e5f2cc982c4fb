"""The nodes of a fleet, as its leader checks them when they join, and calls them by rank."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from tasuki.config.schema import CoordinatorConfig, FleetConfig, NodeConfig
from tasuki.fleet.rules import errors_of, worst
from tasuki.rpc.access import fleet_metadata
from tasuki.rpc.port import peer_credentials
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.fleet_pb2 import FleetCommand, FleetNode, JoinRequest
from tasuki.v1.types_pb2 import PHASE_TRAIN
from tasuki.wire.address import is_beyond_loopback, reachable, split_host_port
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import (
    DeadlineExceeded,
    FleetEnded,
    FleetMismatch,
    InvalidArgument,
    NotJoined,
    PeerUnavailable,
    StaleEpoch,
    TasukiError,
    from_rpc_error,
)
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
        if known is not None and known.node.boot_id != node.boot_id:
            text = f"node_rank: {node.node_rank} belongs to the node at {known.node.coordinator_target}; give each node its own rank, and "
            rank = {"field": "node_rank", "node_rank": node.node_rank, "expected": known.node.boot_id, "found": node.boot_id}
            raise FleetMismatch(f"{text}restart the job if a node was restarted", **rank)
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


_TARGETS = ("coordinator_target", "trainer_target", "rollout_target")
_NAMED_KEYS = 5
Resolve = Callable[[str], Collection[str]]
"""Resolves a host name to addresses; returns none for an unknown name."""
_LOCAL = ("unix:", "ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")
"""gRPC's name for a caller on the leader's machine."""
_ADVICE = {
    "version": "install the same tasuki on all nodes",
    "packages": "install the same packages on all nodes",
    "num_ranks": "give all nodes the same trainer.num_ranks",
    "num_gpus": "use nodes with the same number of GPUs",
    "config_digest": "start all nodes from the same configuration",
    "model_digest": "give all nodes the same model folder",
}
_DIGESTS = {"config_digest": "configuration", "model_digest": "model"}
"""Names of fields that are digests, for messages; the digests themselves are in the metadata."""


def check_member(request: JoinRequest, leader: FleetNode, *, config: FleetConfig) -> None:
    """Refuses a node that does not match the leader: StaleEpoch for another attempt, else FleetMismatch naming the first field."""
    node, rank = request.node, request.node.node_rank
    if request.name == config.name and request.attempt != config.attempt:
        whose = "the node" if request.attempt < config.attempt else "the leader"
        raise StaleEpoch(
            f"node {rank} belongs to attempt {request.attempt} of the job and the leader to {config.attempt}; stop {whose}, "
            "which belongs to an earlier attempt",
            epoch=request.attempt,
            current_epoch=config.attempt,
        )
    package = next(iter(_differing(leader.packages, node.packages)), "")
    of_leader = f"{package} {leader.packages.get(package, 'none')}"
    pairs: dict[str, tuple[object, object]] = {
        "name": (config.name, request.name),
        "num_nodes": (config.num_nodes, request.num_nodes),
        "node_rank": (rank if rank < config.num_nodes else f"below {config.num_nodes}", rank),
        "version": (leader.version, node.version),
        "packages": (of_leader, f"{package} {node.packages.get(package, 'none')}"),
        **{
            name: (getattr(leader, name), getattr(node, name))
            for name in ("num_ranks", "num_gpus", "config_digest", "model_digest")
        },
    }
    for field, (expected, found) in pairs.items():
        if expected != found:
            problem = f"has {found}, the fleet has {expected}"
            keys = _differing(leader.config_keys, node.config_keys)
            if field == "config_digest" and keys:
                more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
                problem = f"differs from the leader in {', '.join(keys[:_NAMED_KEYS])}{more}"
            elif field in _DIGESTS:
                problem = f"has a different {_DIGESTS[field]} from the leader"
            advice = _ADVICE.get(field, "start all nodes with the same [fleet]")
            text = f"{field}: node {rank} {problem}; {advice}"
            raise FleetMismatch(text, field=field, node_rank=rank, expected=expected, found=found)


def callable_node(
    node: FleetNode, *, peer: str, certified: Sequence[str] = (), resolve: Resolve = lambda _: frozenset()
) -> FleetNode:
    """The node with targets that the leader can call.

    peer: gRPC's name for the caller. certified: names and addresses in the node's certificate; none without TLS. Raises InvalidArgument.
    """
    hosts = None
    if certified and not peer.startswith("unix:"):
        # Names in the certificate for the host at `peer`; its address comes first.
        address = split_host_port(_host_port(peer))[0]
        named = [f"{node.host}{name[1:]}" if name.startswith("*.") else name for name in certified if "/" not in name]
        own = (name for name in named if name == address or address in resolve(name))
        hosts = sorted(own, key=lambda name: name != address)
    found = deepcopy(node)
    for field in _TARGETS:
        setattr(found, field, _callable_target(field, getattr(node, field), peer=peer, hosts=hosts))
    return found


def _differing(leader: Mapping[str, str], node: Mapping[str, str]) -> list[str]:
    """Keys whose values differ, or that only one of the two has."""
    return sorted(key for key in {*leader, *node} if leader.get(key) != node.get(key))


def _callable_target(field: str, target: str, *, peer: str, hosts: Sequence[str] | None) -> str:
    """hosts: names of the caller accepted by TLS; None without TLS."""
    is_local = peer.startswith(_LOCAL)
    if target.startswith("unix:"):
        if not is_local:
            raise InvalidArgument(field, f"{target} is not an address for another machine: set listen to HOST:PORT")
        return target
    try:
        split_host_port(target)
    except ValueError as error:
        raise InvalidArgument(field, str(error)) from error
    found = reachable(target, seen_from=_host_port(peer))
    if found != target and hosts is not None:
        if not hosts:
            raise InvalidArgument(
                field,
                f"the node's certificate names neither {found} nor a host name of it: `tasuki certs --host` with the name that the leader "
                f"resolves, or set listen to HOST:PORT",
            )
        found = f"{hosts[0]}:{split_host_port(target)[1]}"
    if not is_local and not is_beyond_loopback(found):
        raise InvalidArgument(field, f"{target} is loopback, which the leader cannot call: set listen to HOST:PORT")
    return found


def _host_port(peer: str) -> str:
    """ "10.0.0.2:4711" of gRPC's "ipv4:10.0.0.2:4711"."""
    return peer if peer.startswith("unix:") else peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")
