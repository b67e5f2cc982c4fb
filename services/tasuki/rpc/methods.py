"""Properties of every method: kind and mutation, from its descriptor, and the least role that may call it at a port."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from tasuki.config.schema import CallerRole
from tasuki.v1 import coordinator_pb2, fleet_pb2, memory_pb2, metrics_pb2, rank_store_pb2, rollout_pb2, trainer_pb2

# They change the phase but carry no CommandId: a client needs no epoch for them.
_COORDINATOR_MUTATIONS = {"Acquire", "RunStage"}
# The least role that may call a method at a port. A method missing here is refused: tests/unit/test_access.py walks the descriptors.
_VIEWER, _TRAINER, _OPERATOR, _PEER = CallerRole
_METHODS_OF: dict[CallerRole, dict[str, str]] = {
    _VIEWER: {
        "grpc.health.v1.Health": "Check Watch",
        "grpc.reflection.v1alpha.ServerReflection": "ServerReflectionInfo",
        "tasuki.v1.CoordinatorService": "GetState ListChangeovers Plan WatchState",
        "tasuki.v1.FleetService": "GetFleet",
        "tasuki.v1.MemoryService": "GetUsage WatchUsage",
        "tasuki.v1.MetricsService": "GetMetrics",
        "tasuki.v1.RolloutService": "GetRolloutState",
        "tasuki.v1.TrainerService": "GetTrainerState",
    },
    _TRAINER: {
        "tasuki.v1.CoordinatorService": "Acquire",
        "tasuki.v1.RolloutService": "Generate",
        "tasuki.v1.TrainerService": "BeginRun ComputeLogProbs ComputeValues DiscardGradients ExportModel "
        "ForwardBackward LoadCheckpoint OptimStep SaveCheckpoint",
    },
    _OPERATOR: {"tasuki.v1.CoordinatorService": "RunStage"},
    _PEER: {
        "tasuki.v1.FleetService": "Heartbeat Join",
        "tasuki.v1.MemoryService": "Pause Resume",
        "tasuki.v1.RankStoreService": "AddToKey CheckKeys CompareAndSetKey DeleteKey JoinRanks ReadKey SetKey WaitForKeys",
        "tasuki.v1.RolloutService": "Drain ReceiveWeights",
        "tasuki.v1.TrainerService": "PublishWeights WithdrawWeights",
    },
}
_ROLES = {
    f"{service}/{method}": role
    for role, services in _METHODS_OF.items()
    for service, methods in services.items()
    for method in methods.split()
}


class PathUse(StrEnum):
    """Use of a path that a caller names."""

    WRITE = "write"
    READ = "read"


_PATH_USES = {"SaveCheckpoint": PathUse.WRITE, "ExportModel": PathUse.WRITE, "LoadCheckpoint": PathUse.READ}


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    """E.g. "tasuki.v1.TrainerService/OptimStep"."""
    kind: str = "bidi_stream"
    """"unary", "server_stream", "client_stream" or "bidi_stream", as grpc_type is called in metrics."""
    needs_deadline: bool = False
    role: CallerRole | None = None
    """Least role that may call it at a port; None if no role may."""
    path_use: PathUse | None = None
    """Use of the request's `path`; None if it has none."""

    @property
    def service(self) -> str:
        return self.name.partition("/")[0]

    @property
    def method(self) -> str:
        return self.name.partition("/")[2]


def _carries_command(message: Descriptor, *, depth: int = 2) -> bool:
    """Whether a request has a CommandId, directly or in its header."""
    for field in message.fields:
        below = field.message_type
        if below is None:
            continue
        if below.full_name == "tasuki.v1.CommandId" or (depth and _carries_command(below, depth=depth - 1)):
            return True
    return False


def _described(method: MethodDescriptor) -> Method:
    kinds = ("unary", "server_stream", "client_stream", "bidi_stream")
    name = f"{method.containing_service.full_name}/{method.name}"
    return Method(
        name=name,
        kind=kinds[2 * method.client_streaming + method.server_streaming],
        needs_deadline=_carries_command(method.input_type) or method.name in _COORDINATOR_MUTATIONS,
        role=_ROLES.get(name),
        path_use=_PATH_USES.get(method.name),
    )


def _methods(services: Iterable[ServiceDescriptor]) -> dict[str, Method]:
    return {f"/{service.full_name}/{method.name}": _described(method) for service in services for method in service.methods}


METHODS: dict[str, Method] = _methods(
    service
    for file in (coordinator_pb2, fleet_pb2, memory_pb2, metrics_pb2, rank_store_pb2, rollout_pb2, trainer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
"""Every method of tasuki.v1 by its path on the wire."""


def standard_methods() -> dict[str, Method]:
    """Methods of health and reflection."""
    pool = descriptor_pool.Default()
    return _methods(pool.FindServiceByName(name) for name in (health.SERVICE_NAME, reflection.SERVICE_NAME))


def unknown_method(path: str) -> Method:
    """Method in no table, which no role may call at a port."""
    return Method(path.removeprefix("/"))
