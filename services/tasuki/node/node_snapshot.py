"""State of a node's three services at one moment."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import log_path, node_targets
from tasuki.config.schema import NodeConfig
from tasuki.node.exit_report import node_down, read_log
from tasuki.rpc.port import check_files
from tasuki.rpc.process_start import read_start_seconds
from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import open_blocking_channel
from tasuki.wire.errors import DeadlineExceeded, InvalidArgument, PeerUnavailable, from_rpc_error

_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """Everything the services report at one moment. A memory report without tags means unknown.

    changeovers: the latest ones, newest first. absent: services that did not answer, each with an explanation.
    """

    node: coordinator_pb2.NodeState
    trainer: trainer_pb2.GetTrainerStateResponse
    rollout: rollout_pb2.GetRolloutStateResponse
    trainer_memory: memory_pb2.GetUsageResponse
    rollout_memory: memory_pb2.GetUsageResponse
    changeovers: Sequence[coordinator_pb2.Changeover]
    absent: Mapping[str, str]
    start_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Duration of each service's last start, by part."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Unix socket of each service, and its port if it has one."""
    files_problem: str = ""
    """Why a file of [security] cannot be used, so that the ports keep the last certificate and admit no new caller."""


class NodeReader:
    """Reads a running node. Close it, or use it as a context manager."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._state_dir, targets, ports = config.state_dir, node_targets(config), config.port_targets
        self._addresses = {name: f"{target} and {ports[name]}" if ports else target for name, target in targets.items()}
        self._channels = {name: open_blocking_channel(target) for name, target in targets.items()}
        self.coordinator = CoordinatorServiceStub(self._channels["coordinator"])
        self._trainer = TrainerServiceStub(self._channels["trainer"])
        self._rollout = RolloutServiceStub(self._channels["rollout"])
        self._memory = {name: MemoryServiceStub(self._channels[name]) for name in ("trainer", "rollout")}

    def __enter__(self) -> "NodeReader":
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def read(self) -> NodeSnapshot:
        """Reads the node's state. Raises NodeDown if its coordinator does not answer and no node runs in the folder."""
        states = self.read_states()
        absent = dict(states.absent)
        listing, listed = coordinator_pb2.ListChangeoversRequest(page_size=4), coordinator_pb2.ListChangeoversResponse()
        changeovers = self._ask(absent, "coordinator", self.coordinator.ListChangeovers, listing, listed).changeovers
        trainer_memory, rollout_memory = (self._usage(service, absent) for service in ("trainer", "rollout"))
        return replace(
            states,
            trainer_memory=trainer_memory,
            rollout_memory=rollout_memory,
            changeovers=changeovers,
            absent=absent,
            files_problem=self._files_problem(),
            start_seconds={name: read_start_seconds(self._state_dir, name) for name in ("trainer", "rollout")},
        )

    def read_states(self) -> NodeSnapshot:
        """Like `read`, but without changeovers, and without memory, which would involve the ranks."""
        absent: dict[str, str] = {}
        ask = functools.partial(self._ask, absent)
        node_request, node = coordinator_pb2.GetStateRequest(), coordinator_pb2.GetStateResponse()
        node = ask("coordinator", self.coordinator.GetState, node_request, node)
        trainer_request, rollout_request = trainer_pb2.GetTrainerStateRequest(), rollout_pb2.GetRolloutStateRequest()
        return NodeSnapshot(
            node=node.state,
            trainer=ask("trainer", self._trainer.GetTrainerState, trainer_request, trainer_pb2.GetTrainerStateResponse()),
            rollout=ask("rollout", self._rollout.GetRolloutState, rollout_request, rollout_pb2.GetRolloutStateResponse()),
            trainer_memory=memory_pb2.GetUsageResponse(),
            rollout_memory=memory_pb2.GetUsageResponse(),
            changeovers=(),
            absent=absent,
            addresses=self._addresses,
        )

    def _ask(
        self, absent: dict[str, str], service: str, call: Callable[..., _Answer], request: Message, nothing: _Answer
    ) -> _Answer:
        if service in absent:
            return nothing
        try:
            return call(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            known = from_rpc_error(error)
            if not isinstance(known, DeadlineExceeded | PeerUnavailable):
                raise known from error
            has_node = holder(self._state_dir, name=NODE_LOCK) is not None
            if service == "coordinator" and not has_node and isinstance(known, PeerUnavailable):
                raise node_down(self._state_dir) from error
            if isinstance(known, PeerUnavailable):
                absent[service] = self._start_of(service) if has_node else "is not there"
            elif isinstance(known, DeadlineExceeded):
                absent[service] = f"has not answered for {_TIMEOUT_S:.0f} s"
            return nothing

    def _files_problem(self) -> str:
        try:
            for service in self._channels:
                check_files(self._config, service)
        except InvalidArgument as error:
            return error.message
        return ""

    def _start_of(self, service: str) -> str:
        """Whether the service is starting or restarting, and what that waits for: its supervisor logs every start after the first."""
        log = read_log(log_path(self._state_dir, "supervisor"))
        told = [line for line in log.splitlines() if f" service={service} " in line]
        if told and "event=restart_waits " in told[-1]:
            return f"waits to be restarted: {told[-1].partition(' error=')[2]}"
        return "is being restarted" if any("event=restart " in line for line in told) else "is starting"

    def _usage(self, service: str, absent: dict[str, str]) -> memory_pb2.GetUsageResponse:
        """Memory usage; empty while the ranks are busy with something long, so that the rest can be shown."""
        request = memory_pb2.GetUsageRequest()
        return self._ask({**absent}, service, self._memory[service].GetUsage, request, memory_pb2.GetUsageResponse())


def as_dict(snapshot: NodeSnapshot) -> dict[str, object]:
    """Converts to plain values, with the protos' names of fields and enums."""
    return {
        "node": plain(snapshot.node),
        "trainer": {**plain(snapshot.trainer), "memory": plain(snapshot.trainer_memory)},
        "rollout": {**plain(snapshot.rollout), "memory": plain(snapshot.rollout_memory)},
        "changeovers": [plain(changeover) for changeover in snapshot.changeovers],
        "absent": dict(snapshot.absent),
        "addresses": dict(snapshot.addresses),
        "files_problem": snapshot.files_problem,
        "start_seconds": {name: dict(parts) for name, parts in snapshot.start_seconds.items()},
    }


def plain(message: Message) -> dict[str, object]:
    """Converts a message to a dict with the protos' field names, including zero fields."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
