"""Phases, stages and memory tags, and the ring: one row for each stage with its service, RPC, memory moved, and undo. Pure.

        LOAD_WEIGHTS > RESUME_WEIGHTS > SYNC > OFFLOAD > RESUME_KV
TRAIN                                                                ROLLOUT
        LOAD_TRAINER < PAUSE_WEIGHTS < PAUSE_KV < DRAIN
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from google.protobuf.descriptor import EnumDescriptor

from tasuki.v1 import coordinator_pb2, types_pb2

_ENUMS: dict[str, EnumDescriptor] = {
    **types_pb2.DESCRIPTOR.enum_types_by_name,
    **coordinator_pb2.DESCRIPTOR.enum_types_by_name,
}


class WireEnum(StrEnum):
    """An enum of the protos under its own name; members are named without the prefix."""

    def __eq__(self, other: object) -> bool:
        """Raises TypeError for a number of messages, which no member equals: `of` and `number` convert."""
        if isinstance(other, int):
            name = type(self).__name__
            raise TypeError(f"{other} is a number of messages: compare {name}.of({other}) with {name}.{self.name}")
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = StrEnum.__hash__

    @property
    def number(self) -> Any:
        """Value in messages."""
        return self._descriptor().values_by_name[self._prefix() + self.name].number

    @classmethod
    def of(cls, number: int) -> Self | None:
        """Member with this value in messages; None for UNSPECIFIED and for values that this build does not know."""
        value = cls._descriptor().values_by_number.get(number) if number else None
        return None if value is None else cls[value.name.removeprefix(cls._prefix())]

    @classmethod
    def known(cls, number: int) -> Self:
        """Member with this value in messages. Raises ValueError if there is none."""
        member = cls.of(number)
        if member is None:
            raise ValueError(f"{number} is no {cls.__name__} of this build")
        return member

    @classmethod
    def all_of(cls, numbers: Iterable[int]) -> list[Self]:
        """Members with these values in messages, without UNSPECIFIED and those that this build does not know."""
        return [member for number in numbers if (member := cls.of(number)) is not None]

    @classmethod
    def _descriptor(cls) -> EnumDescriptor:
        return _ENUMS[cls.__name__]

    @classmethod
    def _prefix(cls) -> str:
        return cls._descriptor().values[0].name.removesuffix("UNSPECIFIED")


class Phase(WireEnum):
    """Phase of a node: the service that holds the GPUs."""

    TRAIN = "TRAIN"
    ROLLOUT = "ROLLOUT"


class Service(StrEnum):
    """Service that runs a stage."""

    TRAINER = "trainer"
    ROLLOUT = "rollout"


class Stage(WireEnum):
    """One step of a changeover."""

    LOAD_WEIGHTS = "LOAD_WEIGHTS"
    RESUME_WEIGHTS = "RESUME_WEIGHTS"
    SYNC = "SYNC"
    OFFLOAD = "OFFLOAD"
    RESUME_KV = "RESUME_KV"
    DRAIN = "DRAIN"
    PAUSE_KV = "PAUSE_KV"
    PAUSE_WEIGHTS = "PAUSE_WEIGHTS"
    LOAD_TRAINER = "LOAD_TRAINER"


class StageStatus(WireEnum):
    """Status of a stage or a changeover."""

    STARTED = "STARTED"
    DONE = "DONE"
    FAILED = "FAILED"
    UNDONE = "UNDONE"
    HELD = "HELD"


class MemoryTag(WireEnum):
    """Named class of memory that is paused and resumed as a whole."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"
    EXPORT = "export"


START = "START"
"""Name, in errors, for the position of a service that has completed no stage yet; elsewhere it is None."""


class Rpc(StrEnum):
    """RPC that runs a stage."""

    PUBLISH_WEIGHTS = "PublishWeights"
    RECEIVE_WEIGHTS = "ReceiveWeights"
    DRAIN = "Drain"
    PAUSE = "Pause"
    RESUME = "Resume"


class Undo(StrEnum):
    """Undo of a stage that no other stage undoes."""

    WITHDRAW_WEIGHTS = "WithdrawWeights"
    """Undone by this RPC."""
    WITH_EARLIER = ""
    """Undone by the undo of the service's previous stage."""
    NEVER = "never"
    """Not undone: the weights are gone, and only a SYNC restores them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: a node at `after` may run `stage` on `service`, and is then at `stage`."""

    after: Stage
    stage: Stage
    service: Service
    rpc: Rpc
    undo: Stage | Undo
    resumes: tuple[MemoryTag, ...] = ()
    """Tags that map their pages."""
    pauses: tuple[MemoryTag, ...] = ()
    """Tags that release their pages."""
    completes: Phase | None = None
    """Phase that begins with this stage."""

    @property
    def has_undo(self) -> bool:
        return self.undo is not Undo.NEVER

    @property
    def undo_command(self) -> str:
        """Stage or RPC that undoes this one; empty if none is sent."""
        return self.undo if self.has_undo else ""

    @property
    def named_tags(self) -> tuple[MemoryTag, ...]:
        """Tags that a Pause or Resume names, without captured graphs, which go with the cache, and exports, which go with a publication."""
        unnamed = (MemoryTag.CUDA_GRAPH, MemoryTag.EXPORT)
        return tuple(tag for tag in (*self.resumes, *self.pauses) if tag not in unnamed)


_WEIGHTS = (MemoryTag.WEIGHTS,)
_CACHE = (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)
# Every tag that the trainer can pause, even those that could stay; the planner relies on it.
_TRAINING = (MemoryTag.WEIGHTS, MemoryTag.GRADIENTS, MemoryTag.OPTIMIZER)

RING = (
    Rule(
        after=Stage.LOAD_TRAINER,
        stage=Stage.LOAD_WEIGHTS,
        service=Service.TRAINER,
        rpc=Rpc.PUBLISH_WEIGHTS,
        undo=Undo.WITHDRAW_WEIGHTS,
        resumes=(MemoryTag.EXPORT,),
    ),
    Rule(
        after=Stage.LOAD_WEIGHTS,
        stage=Stage.RESUME_WEIGHTS,
        service=Service.ROLLOUT,
        rpc=Rpc.RESUME,
        undo=Stage.PAUSE_WEIGHTS,
        resumes=_WEIGHTS,
    ),
    Rule(
        after=Stage.RESUME_WEIGHTS,
        stage=Stage.SYNC,
        service=Service.ROLLOUT,
        rpc=Rpc.RECEIVE_WEIGHTS,
        undo=Undo.WITH_EARLIER,
    ),
    Rule(
        after=Stage.SYNC,
        stage=Stage.OFFLOAD,
        service=Service.TRAINER,
        rpc=Rpc.PAUSE,
        undo=Stage.LOAD_TRAINER,
        pauses=_TRAINING,
    ),
    Rule(
        after=Stage.OFFLOAD,
        stage=Stage.RESUME_KV,
        service=Service.ROLLOUT,
        rpc=Rpc.RESUME,
        undo=Stage.PAUSE_KV,
        resumes=_CACHE,
        completes=Phase.ROLLOUT,
    ),
    Rule(
        after=Stage.RESUME_KV,
        stage=Stage.DRAIN,
        service=Service.ROLLOUT,
        rpc=Rpc.DRAIN,
        undo=Stage.RESUME_KV,
    ),
    Rule(
        after=Stage.DRAIN,
        stage=Stage.PAUSE_KV,
        service=Service.ROLLOUT,
        rpc=Rpc.PAUSE,
        undo=Undo.WITH_EARLIER,
        pauses=_CACHE,
    ),
    Rule(
        after=Stage.PAUSE_KV,
        stage=Stage.PAUSE_WEIGHTS,
        service=Service.ROLLOUT,
        rpc=Rpc.PAUSE,
        undo=Undo.NEVER,
        pauses=_WEIGHTS,
    ),
    Rule(
        after=Stage.PAUSE_WEIGHTS,
        stage=Stage.LOAD_TRAINER,
        service=Service.TRAINER,
        rpc=Rpc.RESUME,
        # Makes room for a starting engine.
        undo=Stage.OFFLOAD,
        resumes=_TRAINING,
        completes=Phase.TRAIN,
    ),
)
RULES = {rule.stage: rule for rule in RING}
HOLDS = {rule.completes: rule.stage for rule in RING if rule.completes is not None}
"""Where a node is while a phase holds."""
NEXT = {rule.after: rule.stage for rule in RING}
"""The only stage that may come after each."""


def stages_of(service: Service, rpc: Rpc | None = None) -> tuple[Stage, ...]:
    """Stages of a service, in order; with `rpc`, only those that this RPC runs."""
    return tuple(rule.stage for rule in RING if rule.service is service and rpc in (None, rule.rpc))


def last_of(service: Service, at: Stage) -> Stage:
    """Stage that a service completed last when the node is at `at`."""
    while RULES[at].service is not service:
        at = RULES[at].after
    return at


def allowed_after(service: Service, at: Stage | None) -> tuple[Stage, ...]:
    """Stages accepted by a service that completed `at` last (None: freshly started): its next stage, then the one that undoes `at`.

    A fresh rollout is asleep, as after PAUSE_WEIGHTS. A fresh trainer is loaded, as after LOAD_TRAINER, so loading is then a no-op.
    """
    if at is None:
        last = last_of(service, HOLDS[Phase.TRAIN])
        repeated = (last,) if service is Service.TRAINER else ()
        return (*allowed_after(service, last), *repeated)
    own = stages_of(service)
    following = own[(own.index(at) + 1) % len(own)]
    undone = at
    while RULES[undone].undo is Undo.WITH_EARLIER:
        undone = own[own.index(undone) - 1]
    undo = RULES[undone].undo
    return (following, undo) if isinstance(undo, Stage) and undo is not following else (following,)
