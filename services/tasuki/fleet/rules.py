"""Rules for the fleet's next action, from the nodes' states. Pure: no I/O, no proto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from tasuki.coordinator.phases import path
from tasuki.fleet.records import Decision, NodeView, Sums
from tasuki.memory.stages import HOLDS, Phase, Stage
from tasuki.wire.errors import TasukiError, WeightsDiffer, from_reason

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


def common_place(views: Iterable[NodeView]) -> Stage | None:
    """The place of all nodes; None if they differ or one is unknown."""
    places = {view.at for view in views}
    return places.pop() if len(places) == 1 else None


def serves(view: NodeView, decision: Decision | None) -> bool:
    """Whether the node serves the decided weights."""
    return decision is not None and view.at is ROLLOUT and view.weights_digest == decision.weights_digest


def step_forward(view: NodeView, decision: Decision, *, until: Stage) -> Stage | Step | None:
    """The next step of a node towards `until`, a stage after the decision; None once it is there.

    A node that lost the weights goes back alone and receives them again: only decided weights are ever served.
    """
    if view.at in (Stage.SYNC, *COMMIT) and view.weights_digest == decision.weights_digest:
        done = COMMIT[: COMMIT.index(view.at) + 1] if view.at in COMMIT else ()
        return None if until in done else COMMIT[len(done)]
    at = view.at
    if at is TRAIN:
        return PREPARE[0]
    if at in PREPARE[:-1]:
        return PREPARE[PREPARE.index(at) + 1]
    return Step.ACQUIRE_TRAIN


def agreed(sums: Mapping[int, Sums | None]) -> Sums:
    """Checksums that every node agrees on. Raises WeightsDiffer naming the deviating nodes and tensors. sums: by rank."""
    unknown = [rank for rank, one in sums.items() if one is None]
    if unknown:
        raise WeightsDiffer(f"nodes {_listed(unknown)} do not know what they received", nodes=_listed(unknown), tensors="")
    known = {rank: one for rank, one in sums.items() if one is not None}
    most = Counter(known.values()).most_common(1)[0][0]
    differing = [rank for rank, one in known.items() if one != most]
    if not differing:
        return most
    other = known[differing[0]]
    problem, tensors = _difference(most, other)
    raise WeightsDiffer(
        f"nodes {_listed(differing)} received other weights than the rest: {problem}; none are served",
        nodes=_listed(differing),
        tensors=tensors,
    )


def _difference(most: Sums, other: Sums) -> tuple[str, str]:
    if most.policy_version != other.policy_version:
        return f"version {other.policy_version} in place of {most.policy_version}", ""
    if most.layout_digest != other.layout_digest or len(most.checksums) != len(other.checksums):
        return "names, dtypes or shapes of the tensors differ", ""
    pairs = zip(most.checksums, other.checksums, strict=True)
    tensors = [place for place, (one, two) in enumerate(pairs) if one != two]
    named = _listed(tensors[:_NAMED_TENSORS])
    return f"{len(tensors)} of {len(most.checksums)} tensors differ, by place in the order of names: {named}", named


def worst(errors: Sequence[tuple[int, TasukiError]]) -> TasukiError:
    """The error to raise of several, given as (rank, error): a refusal before a loss. Adds the node's rank."""
    rank, error = min(errors, key=lambda one: (one[1].reason == "PEER_UNAVAILABLE", one[0]))
    metadata = {**error.metadata, "node_rank": str(rank)}
    return from_reason(error.reason, f"node {rank}: {error.message}", metadata)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
