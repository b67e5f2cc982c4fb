"""Merges the states of a fleet's nodes into one."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from tasuki.v1 import rollout_pb2, trainer_pb2
from tasuki.v1.types_pb2 import STAGE_UNSPECIFIED

_Value = TypeVar("_Value", bound=Hashable)


def merged_rollout_state(states: Sequence[rollout_pb2.GetRolloutStateResponse]) -> rollout_pb2.GetRolloutStateResponse:
    """Where nodes differ, the least advanced counts: a version is served, and a stage completed, only if all nodes have.

    states: of all nodes, in order.
    """
    first = states[0]
    poisons = [f"node {rank}: {state.poison_reason}" for rank, state in enumerate(states) if state.is_poisoned]
    return rollout_pb2.GetRolloutStateResponse(
        boot_id=joined_id(state.boot_id for state in states),
        stage=common([state.stage for state in states], otherwise=STAGE_UNSPECIFIED),
        resident_tags=[tag for tag in first.resident_tags if all(tag in state.resident_tags for state in states)],
        policy_version=common([_optional(state, "policy_version") for state in states], otherwise=None),
        received_version=common([_optional(state, "received_version") for state in states], otherwise=None),
        is_poisoned=bool(poisons),
        poison_reason="; ".join(poisons),
        num_running=sum(state.num_running for state in states),
        tp_size=first.tp_size,
        dp_size=sum(state.dp_size for state in states),
        context_length=min(state.context_length for state in states),
        vocab_size=first.vocab_size,
        model_path=first.model_path,
        is_in_stage=any(state.is_in_stage for state in states),
        stop_token_ids=first.stop_token_ids,
    )


def merged_trainer_state(states: Sequence[trainer_pb2.GetTrainerStateResponse]) -> trainer_pb2.GetTrainerStateResponse:
    """Same as merged_rollout_state. Trainers step in lock step: one that is behind has yet to finish its step."""
    first = states[0]
    merged = trainer_pb2.GetTrainerStateResponse()
    merged.CopyFrom(first)
    merged.boot_id = joined_id(state.boot_id for state in states)
    merged.ClearField("epoch")
    merged.ClearField("sequence")
    merged.stage = common([state.stage for state in states], otherwise=STAGE_UNSPECIFIED)
    del merged.resident_tags[:]
    merged.resident_tags.extend(tag for tag in first.resident_tags if all(tag in state.resident_tags for state in states))
    merged.policy_version = min(state.policy_version for state in states)
    if common([_optional(state, "published_version") for state in states], otherwise=None) is None:
        merged.ClearField("published_version")
    merged.has_gradients = any(state.has_gradients for state in states)
    merged.num_ranks = sum(state.num_ranks for state in states)
    merged.is_in_stage = any(state.is_in_stage for state in states)
    merged.micro_batch_tokens = min(state.micro_batch_tokens for state in states)
    if all(state.HasField("nodes_rate") for state in states):
        merged.nodes_rate = min(state.nodes_rate for state in states)
    else:
        merged.ClearField("nodes_rate")
    transports = [state.nodes_transport for state in states]
    named = "; ".join(f"{transport or 'unknown'} on node {rank}" for rank, transport in enumerate(transports))
    merged.nodes_transport = common(transports, otherwise=named)
    for place, role in enumerate(merged.roles):
        of_nodes = [state.roles[place] for state in states]
        role.version = min(one.version for one in of_nodes)
        role.has_gradients = any(one.has_gradients for one in of_nodes)
    return merged


def common(values: Sequence[_Value], *, otherwise: _Value) -> _Value:
    """The common value, or `otherwise` if values differ."""
    return values[0] if len(set(values)) == 1 else otherwise


def joined_id(ids: Iterable[str]) -> str:
    """An id that changes whenever one of `ids` does."""
    return hashlib.sha256("/".join(ids).encode()).hexdigest()[:32]


def _optional(state: rollout_pb2.GetRolloutStateResponse | trainer_pb2.GetTrainerStateResponse, name: str) -> int | None:
    value: int = getattr(state, name)
    return value if state.HasField(name) else None  # pyright: ignore[reportArgumentType]  the stub lists names
