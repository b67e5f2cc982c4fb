"""Converts the coordinator's values to protobuf messages and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from tasuki.config.lock import Instance
from tasuki.coordinator.records import ChangeoverRecord, NodeState, StageEvent, Status
from tasuki.memory.stages import Phase
from tasuki.rpc.stages import stage_to_proto
from tasuki.v1 import coordinator_pb2, types_pb2


def phase_to_proto(phase: Phase | None) -> types_pb2.Phase.ValueType:
    return types_pb2.Phase.Value(f"PHASE_{phase}") if phase else types_pb2.PHASE_UNSPECIFIED


def phase_from_proto(number: types_pb2.Phase.ValueType) -> Phase | None:
    """None for UNSPECIFIED and for numbers that this build does not know."""
    if number == types_pb2.PHASE_UNSPECIFIED or number not in types_pb2.Phase.values():
        return None
    return Phase(types_pb2.Phase.Name(number).removeprefix("PHASE_"))


def event_to_proto(event: StageEvent) -> coordinator_pb2.StageEvent:
    return coordinator_pb2.StageEvent(
        changeover_id=event.changeover_id,
        stage=stage_to_proto(event.stage),
        status=_status(event.status),
        time=_timestamp(event.time),
        seconds=event.seconds,
        bytes=event.num_bytes,
        error_reason=event.error_reason,
        error_message=event.error_message,
    )


def changeover_to_proto(changeover: ChangeoverRecord) -> coordinator_pb2.Changeover:
    return coordinator_pb2.Changeover(
        changeover_id=changeover.changeover_id,
        target=phase_to_proto(changeover.target),
        status=_status(changeover.status),
        policy_version=changeover.policy_version or 0,
        start_time=_timestamp(changeover.start_time),
        seconds=changeover.seconds,
        stages=[event_to_proto(event) for event in changeover.stages()],
        epoch=changeover.epoch,
    )


def state_to_proto(state: NodeState, *, instance: Instance) -> coordinator_pb2.NodeState:
    return coordinator_pb2.NodeState(
        phase=phase_to_proto(state.phase),
        stage=stage_to_proto(state.at),
        epoch=state.epoch,
        policy_version=state.policy_version,
        boot_id=state.boot_id,
        changeover_id=state.changeover_id,
        trainer_target=state.trainer_target,
        rollout_target=state.rollout_target,
        next_stage=stage_to_proto(state.next_stage),
        num_changeovers=state.num_changeovers,
        last_error=state.last_error,
        instance_id=instance.id,
        lock_path=instance.lock_path,
        weights_digest=state.weights_digest,
    )


def state_for(context: Any, state: coordinator_pb2.NodeState, *, port_targets: Mapping[str, str]) -> coordinator_pb2.NodeState:
    """State for one caller: at a port it has the services' ports, "" for a service without one."""
    if context.peer().startswith("unix:"):
        return state
    told = coordinator_pb2.NodeState()
    told.CopyFrom(state)
    told.trainer_target, told.rollout_target = (port_targets.get(service, "") for service in ("trainer", "rollout"))
    return told


def _status(status: Status) -> coordinator_pb2.StageStatus.ValueType:
    return coordinator_pb2.StageStatus.Value(f"STAGE_STATUS_{status}")


def _timestamp(seconds: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(int(seconds * 1e9))
    return timestamp
