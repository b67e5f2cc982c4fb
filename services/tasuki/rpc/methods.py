"""What is known of every method from its descriptor: its kind, and whether it changes state."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, MethodDescriptor

from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2

# They change the phase, but carry no CommandId: they are how one comes to an epoch.
_COORDINATOR_MUTATIONS = {"Acquire", "RunStage"}


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    """E.g. "tasuki.v1.TrainerService/OptimStep"."""
    service: str
    method: str
    kind: str
    """"unary", "server_stream", "client_stream" or "bidi_stream", as grpc_type is called in metrics."""
    needs_deadline: bool


def _carries_command(message: Descriptor, *, depth: int = 2) -> bool:
    """Whether a request holds a CommandId, itself or in its header."""
    for field in message.fields:
        below = field.message_type
        if below is None:
            continue
        if below.full_name == "tasuki.v1.CommandId" or (depth and _carries_command(below, depth=depth - 1)):
            return True
    return False


def _described(method: MethodDescriptor) -> Method:
    kinds = {
        (False, False): "unary",
        (False, True): "server_stream",
        (True, False): "client_stream",
        (True, True): "bidi_stream",
    }
    service = method.containing_service.full_name
    return Method(
        name=f"{service}/{method.name}",
        service=service,
        method=method.name,
        kind=kinds[method.client_streaming, method.server_streaming],
        needs_deadline=_carries_command(method.input_type) or method.name in _COORDINATOR_MUTATIONS,
    )


METHODS: dict[str, Method] = {
    f"/{service.full_name}/{method.name}": _described(method)
    for file in (coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every method of tasuki.v1 by its path on the wire."""
