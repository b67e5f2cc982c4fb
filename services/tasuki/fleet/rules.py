"""Rules for the fleet's next action, from the nodes' states. Pure: no I/O."""

import hashlib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from tasuki.coordinator.phases import path
from tasuki.v1 import rollout_pb2, trainer_pb2
from tasuki.v1.coordinator_pb2 import NodeState
from tasuki.v1.types_pb2 import STAGE_UNSPECIFIED
from tasuki.v1.weights_pb2 import WeightSums
from tasuki.wire.errors import PeerUnavailable, PermissionDenied, TasukiError, WeightsDiffer, from_reason
from tasuki.wire.stages import HOLDS, Phase, Stage

TRAIN, ROLLOUT = HOLDS[Phase.TRAIN], HOLDS[Phase.ROLLOUT]
_TO_ROLLOUT = path(TRAIN, Phase.ROLLOUT)
PREPARE, COMMIT = _TO_ROLLOUT[: _TO_ROLLOUT.index(Stage.SYNC) + 1], _TO_ROLLOUT[_TO_ROLLOUT.index(Stage.SYNC) + 1 :]
"""The stages before and after the decision."""
TO_TRAIN = path(ROLLOUT, Phase.TRAIN)
_NAMED_TENSORS = 5


class Step(StrEnum):
    """Requests to a node other than stages."""

    LOOK = "LOOK"
    ACQUIRE_TRAIN = "ACQUIRE_TRAIN"


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision that all nodes will serve these weights: it can only be completed. number: of the changeover."""

    number: int
    policy_version: int
    weights_digest: bytes


def place(state: NodeState) -> Stage | None:
    """The last completed stage; None if the node does not know, as while a service restarts."""
    return Stage.of(state.stage)


def common_place(states: Iterable[NodeState]) -> Stage | None:
    """The place of all nodes; None if they differ or one is unknown."""
    places = {place(state) for state in states}
    return places.pop() if len(places) == 1 else None


def serves(state: NodeState, decision: Decision | None) -> bool:
    """Whether the node serves the decided weights."""
    return decision is not None and place(state) is ROLLOUT and state.weights_digest == decision.weights_digest


def next_step(state: NodeState, *, until: Stage, decision: Decision | None) -> Stage | Step | None:
    """The next step of one node towards `until`; None once it is there.

    decision: None on the way to TRAIN. A node that lost the decided weights goes back and receives them again.
    """
    at = place(state)
    if decision is None:
        return None if at is until else Step.ACQUIRE_TRAIN
    if at in (Stage.SYNC, *COMMIT) and state.weights_digest == decision.weights_digest:
        done = COMMIT[: COMMIT.index(at) + 1] if at in COMMIT else ()
        return None if until in done else COMMIT[len(done)]
    if at is TRAIN:
        return PREPARE[0]
    return PREPARE[PREPARE.index(at) + 1] if at in PREPARE[:-1] else Step.ACQUIRE_TRAIN


def digest_of(sums: WeightSums) -> bytes:
    """`weights_digest` of a node that received these weights."""
    return hashlib.sha256(sums.SerializeToString()).digest()


def agreed(sums: Sequence[WeightSums | None]) -> WeightSums:
    """Checksums that every node agrees on. Raises WeightsDiffer naming the deviating nodes and tensors. sums: by rank."""
    known = {rank: one for rank, one in enumerate(sums) if one is not None}
    if unknown := [rank for rank in range(len(sums)) if rank not in known]:
        raise WeightsDiffer(f"nodes {_listed(unknown)} do not know what they received", nodes=_listed(unknown), tensors="")
    common = Counter(map(digest_of, known.values())).most_common(1)[0][0]
    most = next(one for one in known.values() if digest_of(one) == common)
    differing = [rank for rank, one in known.items() if one != most]
    if not differing:
        return most
    problem, tensors = _difference(most, known[differing[0]])
    raise WeightsDiffer(
        f"nodes {_listed(differing)} received other weights than the rest: {problem}; none are served",
        nodes=_listed(differing),
        tensors=tensors,
    )


def _difference(most: WeightSums, other: WeightSums) -> tuple[str, str]:
    if most.policy_version != other.policy_version:
        return f"version {other.policy_version} in place of {most.policy_version}", ""
    if most.layout_digest != other.layout_digest or len(most.checksums) != len(other.checksums):
        return "names, dtypes or shapes of the tensors differ", ""
    pairs = zip(most.checksums, other.checksums, strict=True)
    tensors = [index for index, (one, two) in enumerate(pairs) if one != two]
    named = _listed(tensors[:_NAMED_TENSORS])
    return f"{len(tensors)} of {len(most.checksums)} tensors differ, by place in the order of names: {named}", named


def errors_of(outcomes: Sequence[object]) -> dict[int, TasukiError]:
    """Errors of nodes, by rank. Raises any other exception."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, TasukiError):
            raise outcome
    return {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, TasukiError)}


def worst(errors: Mapping[int, TasukiError]) -> TasukiError:
    """The error to raise of several, by rank: a node's refusal before a node's absence. Adds the rank.

    A message that begins with a field's name still does.
    """
    rank, error = min(errors.items(), key=lambda one: (type(one[1]) is PeerUnavailable, one[0]))
    message = error.message if "field" in error.metadata else f"node {rank}: {error.message}"
    return from_reason(error.reason, message, {**error.metadata, "node_rank": str(rank)})


def renumbered(error: TasukiError, *, field: str, positions: Sequence[int]) -> TasukiError:
    """Converts an error about `field[i]` of a node's share to the call's positions. positions: of the share in the call."""
    pattern = re.compile(rf"\b{field}\[(\d+)\]")

    def named(text: str) -> str:
        return pattern.sub(lambda found: f"{field}[{positions[int(found[1])]}]", text)

    return from_reason(error.reason, named(error.message), {key: named(value) for key, value in error.metadata.items()})


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


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
