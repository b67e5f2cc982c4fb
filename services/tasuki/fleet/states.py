"""Merges the states of a fleet's nodes into one, where the least advanced node counts."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from tasuki.v1 import rollout_pb2, trainer_pb2
from tasuki.v1.types_pb2 import STAGE_UNSPECIFIED
from tasuki.wire.errors import PermissionDenied

_State = TypeVar("_State", rollout_pb2.GetRolloutStateResponse, trainer_pb2.GetTrainerStateResponse)
_Value = TypeVar("_Value", bound=Hashable)


def merged_rollout_state(states: Sequence[rollout_pb2.GetRolloutStateResponse]) -> rollout_pb2.GetRolloutStateResponse:
    """A version is served, and a stage completed, only if all nodes have. states: of all nodes, in order."""
    merged = _merged(states, rollout_pb2.GetRolloutStateResponse(), same=("policy_version", "received_version"))
    poisons = [f"node {rank}: {state.poison_reason}" for rank, state in enumerate(states) if state.is_poisoned]
    merged.is_poisoned, merged.poison_reason = bool(poisons), "; ".join(poisons)
    merged.num_running = sum(state.num_running for state in states)
    merged.dp_size = sum(state.dp_size for state in states)
    merged.context_length = min(state.context_length for state in states)
    return merged


def merged_trainer_state(states: Sequence[trainer_pb2.GetTrainerStateResponse]) -> trainer_pb2.GetTrainerStateResponse:
    """Same as merged_rollout_state. Trainers step in lock step: one that is behind has yet to finish its step."""
    merged = _merged(states, trainer_pb2.GetTrainerStateResponse(), same=("published_version",))
    merged.ClearField("epoch")
    merged.ClearField("sequence")
    merged.policy_version = min(state.policy_version for state in states)
    merged.has_gradients = any(state.has_gradients for state in states)
    merged.num_ranks = sum(state.num_ranks for state in states)
    merged.micro_batch_tokens = min(state.micro_batch_tokens for state in states)
    merged.ClearField("nodes_rate")
    if all(state.HasField("nodes_rate") for state in states):
        merged.nodes_rate = min(state.nodes_rate for state in states)
    transports = [state.nodes_transport for state in states]
    named = "; ".join(f"{transport or 'unknown'} on node {rank}" for rank, transport in enumerate(transports))
    merged.nodes_transport = common(transports, otherwise=named)
    for index, role in enumerate(merged.roles):
        of_nodes = [state.roles[index] for state in states]
        role.version = min(one.version for one in of_nodes)
        role.has_gradients = any(one.has_gradients for one in of_nodes)
    return merged


def _merged(states: Sequence[_State], merged: _State, *, same: Sequence[str]) -> _State:
    """Merges the fields that both services report; the rest are node 0's. same: fields that count only where all nodes agree."""
    merged.CopyFrom(states[0])
    merged.boot_id = hashlib.sha256("/".join(state.boot_id for state in states).encode()).hexdigest()[:32]
    merged.stage = common([state.stage for state in states], otherwise=STAGE_UNSPECIFIED)
    merged.is_in_stage = any(state.is_in_stage for state in states)
    merged.resident_tags[:] = [tag for tag in states[0].resident_tags if all(tag in state.resident_tags for state in states)]
    for field in same:
        if len({(state.HasField(field), getattr(state, field)) for state in states}) > 1:  # pyright: ignore[reportArgumentType]  the stub lists names
            merged.ClearField(field)  # pyright: ignore[reportArgumentType]
    return merged


def common(values: Sequence[_Value], *, otherwise: _Value) -> _Value:
    """The common value, or `otherwise` if values differ."""
    return values[0] if len(set(values)) == 1 else otherwise


async def refuse_stage(self: Any, request: Any, context: Any) -> Any:
    """Answers an RPC that is a stage. Raises PermissionDenied."""
    raise PermissionDenied("this is a stage, which a fleet's coordinator runs on every node; ask it for a phase: Acquire")
