"""What `state` and `watch` show of a node: read from its three services, drawn as text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import TypeVar

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasuki.cli.ending import no_node
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.places import node_targets
from tasuki.config.schema import NodeConfig
from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2, types_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.channel import CLIENT_OPTIONS
from tasuki.wire.errors import DeadlineExceeded, DiskFull, PeerUnavailable, from_rpc_error

_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer", bound=Message)
_MIB = 1024 * 1024
_STAGES = [stage for stage in types_pb2.Stage.values() if stage != types_pb2.STAGE_UNSPECIFIED]


@dataclass(frozen=True, slots=True)
class NodeView:
    """Everything the services say of themselves at one moment; a memory without tags is not known now.

    changeovers: the last few, newest first. absent: services that say nothing of themselves, and what is known of that.
    """

    node: coordinator_pb2.NodeState
    trainer: trainer_pb2.GetTrainerStateResponse
    rollout: rollout_pb2.GetRolloutStateResponse
    trainer_memory: memory_pb2.GetUsageResponse
    rollout_memory: memory_pb2.GetUsageResponse
    changeovers: Sequence[coordinator_pb2.Changeover]
    absent: Mapping[str, str]


class NodeReader:
    """Reads a running node. Close it, or use it as a context manager."""

    def __init__(self, config: NodeConfig) -> None:
        self._state_dir = config.state_dir
        targets = node_targets(config)
        self._channels = {name: grpc.insecure_channel(target, options=CLIENT_OPTIONS) for name, target in targets.items()}
        self.coordinator = CoordinatorServiceStub(self._channels["coordinator"])
        self._trainer = TrainerServiceStub(self._channels["trainer"])
        self._rollout = RolloutServiceStub(self._channels["rollout"])
        self._memory = {name: MemoryServiceStub(self._channels[name]) for name in ("trainer", "rollout")}

    def __enter__(self) -> NodeReader:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def read(self) -> NodeView:
        """What can be read of the node now. Raises NodeDown when its coordinator does not answer and no node runs on the folder."""
        absent: dict[str, str] = {}
        listing = coordinator_pb2.ListChangeoversRequest(page_size=4)
        ask = functools.partial(self._ask, absent)
        node = ask(
            "coordinator", self.coordinator.GetState, coordinator_pb2.GetStateRequest(), coordinator_pb2.GetStateResponse()
        )
        trainer_request, rollout_request = trainer_pb2.GetTrainerStateRequest(), rollout_pb2.GetRolloutStateRequest()
        return NodeView(
            node=node.state,
            trainer=ask("trainer", self._trainer.GetTrainerState, trainer_request, trainer_pb2.GetTrainerStateResponse()),
            rollout=ask("rollout", self._rollout.GetRolloutState, rollout_request, rollout_pb2.GetRolloutStateResponse()),
            trainer_memory=self._usage("trainer", absent),
            rollout_memory=self._usage("rollout", absent),
            changeovers=ask(
                "coordinator", self.coordinator.ListChangeovers, listing, coordinator_pb2.ListChangeoversResponse()
            ).changeovers,
            absent=absent,
        )

    def _ask(
        self, absent: dict[str, str], service: str, call: Callable[..., _Answer], request: Message, nothing: _Answer
    ) -> _Answer:
        """The service's answer; `nothing`, with a note in `absent`, when it has none now."""
        if service in absent:
            return nothing
        try:
            return call(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            known = from_rpc_error(error)
            if not isinstance(known, DeadlineExceeded | PeerUnavailable | DiskFull):
                raise known from error
            has_node = holder(self._state_dir, name=NODE_LOCK) is not None
            if service == "coordinator" and not has_node and isinstance(known, PeerUnavailable):
                raise no_node(self._state_dir) from error
            if isinstance(known, PeerUnavailable):
                absent[service] = "is being started anew" if has_node else "is not there"
            elif isinstance(known, DeadlineExceeded):
                absent[service] = f"has not answered for {_TIMEOUT_S:.0f} s"
            return nothing

    def _usage(self, service: str, absent: dict[str, str]) -> memory_pb2.GetUsageResponse:
        """Nothing while the service's ranks are in the middle of something long: the rest of the node can be told all the same."""
        request = memory_pb2.GetUsageRequest()
        return self._ask({**absent}, service, self._memory[service].GetUsage, request, memory_pb2.GetUsageResponse())


def draw(view: NodeView) -> RenderableType:
    """The whole node as rows of text, for a terminal or a file."""
    busy = [name for name, usage in _usages(view) if not usage.tags and name not in view.absent]
    note = f"the ranks of {' and '.join(busy)} are busy and say nothing of their memory now" if busy else ""
    return Group(_facts(view), Text(), _ring(view), Text(), _memory(view), Text(), _devices(view), Text(note))


def as_dict(view: NodeView) -> dict[str, object]:
    """The same as plain values, with the protos' field names and enum names."""
    return {
        "node": _plain(view.node),
        "trainer": {**_plain(view.trainer), "memory": _plain(view.trainer_memory)},
        "rollout": {**_plain(view.rollout), "memory": _plain(view.rollout_memory)},
        "changeovers": [_plain(changeover) for changeover in view.changeovers],
        "absent": dict(view.absent),
    }


def event_line(event: coordinator_pb2.StageEvent) -> str:
    """One event as one line: time, changeover, stage, status, and what came of it."""
    moment = event.time.ToDatetime(UTC).astimezone().strftime("%H:%M:%S")
    name = stage_name(event.stage) if event.stage else "changeover"
    status = coordinator_pb2.StageStatus.Name(event.status).removeprefix("STAGE_STATUS_")
    figures = f"{event.seconds:.3f} s, {event.bytes / _MIB:.1f} MiB" if event.seconds else ""
    error = f"{event.error_reason}: {event.error_message}" if event.error_reason else ""
    return "  ".join(part for part in (moment, event.changeover_id, f"{name:<14}", status, figures, error) if part)


def stage_name(stage: types_pb2.Stage.ValueType) -> str:
    return types_pb2.Stage.Name(stage).removeprefix("STAGE_")


def phase_name(phase: types_pb2.Phase.ValueType) -> str:
    return types_pb2.Phase.Name(phase).removeprefix("PHASE_") if phase else "between phases"


def _facts(view: NodeView) -> Table:
    node, trainer, rollout = view.node, view.trainer, view.rollout
    served = str(node.policy_version) if node.HasField("policy_version") else "none yet"
    health = f"poisoned: {rollout.poison_reason}" if rollout.is_poisoned else f"{rollout.num_running} requests running"
    learned = "unknown" if "trainer" in view.absent else trainer.policy_version
    told = {
        "coordinator": f"{node.num_changeovers} changeovers, epoch {node.epoch}",
        "trainer": f"{node.trainer_target}  {trainer.num_ranks} ranks, {trainer.num_parameters:,} parameters",
        "rollout": f"{node.rollout_target}  {rollout.dp_size} x TP {rollout.tp_size}, {health}",
    }
    rows = [
        ("phase", "unknown" if "coordinator" in view.absent else phase_name(node.phase)),
        ("stage", f"{stage_name(node.stage)}, next {stage_name(node.next_stage)}" if node.stage else "unknown"),
        ("policy version", f"trainer {learned}, rollout {served}"),
        *((name, view.absent.get(name, text)) for name, text in told.items()),
    ]
    if node.last_error:
        rows.append(("last error", node.last_error))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _ring(view: NodeView) -> Table:
    """The nine stages with the figures of their last run; the mark is where the node stands."""
    last: dict[int, coordinator_pb2.StageEvent] = {}
    for changeover in reversed(view.changeovers):
        last.update({event.stage: event for event in changeover.stages})
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("", "stage", "last", "seconds", "MiB"):
        table.add_column(heading, justify="right" if heading in ("seconds", "MiB") else "left")
    for stage in _STAGES:
        event = last.get(stage)
        status = coordinator_pb2.StageStatus.Name(event.status).removeprefix("STAGE_STATUS_") if event else ""
        seconds, size = (f"{event.seconds:.3f}", f"{event.bytes / _MIB:.1f}") if event else ("", "")
        table.add_row(">" if stage == view.node.stage else "", stage_name(stage), status, seconds, size)
    return table


def _memory(view: NodeView) -> Table:
    sizes = ("mapped", "of", "kept", "on host")
    table = _sizes_table("MiB", "tag", "device", "", sizes=sizes)
    for service, usage in _usages(view):
        for tag in usage.tags:
            name = types_pb2.MemoryTag.Name(tag.tag).removeprefix("MEMORY_TAG_").lower()
            bar = ProgressBar(total=max(tag.total_bytes, 1), completed=tag.mapped_bytes, width=12)
            paused = " (paused)" if tag.is_paused else ""
            figures = (tag.mapped_bytes, tag.total_bytes, tag.kept_bytes, tag.host_copy_bytes)
            table.add_row(service, name + paused, f"{tag.device} rank {tag.rank}", bar, *map(_mib, figures))
    return table


def _devices(view: NodeView) -> Table:
    """What each rank sees of its device, beyond its tags."""
    sizes = ("process", "torch's cache", "others", "free", "of")
    table = _sizes_table("MiB", "seen by", sizes=sizes)
    for service, usage in _usages(view):
        for seen in usage.devices:
            figures = (
                seen.process_bytes,
                seen.torch_cached_bytes,
                seen.other_processes_bytes,
                seen.free_bytes,
                seen.total_bytes,
            )
            table.add_row(seen.device, f"{service} rank {seen.rank}", *map(_mib, figures))
    return table


def _sizes_table(*headings: str, sizes: tuple[str, ...]) -> Table:
    """Narrow enough for 80 columns with figures of a large GPU."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=bool(heading))
    for heading in sizes:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _mib(num_bytes: int) -> str:
    size = num_bytes / _MIB
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}"


def _usages(view: NodeView) -> list[tuple[str, memory_pb2.GetUsageResponse]]:
    return [("trainer", view.trainer_memory), ("rollout", view.rollout_memory)]


def _plain(message: Message) -> dict[str, object]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
