"""Server reflection under both of its names, v1alpha and v1.

grpcio-reflection serves v1alpha only (grpc/grpc#38576); delete the v1 half when it serves both. The two are the same on the wire, so v1 is
v1alpha's servicer and descriptor under another package name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_NAME = "grpc.reflection.v1.ServerReflection"


def enable_reflection(server: grpc.aio.Server, *, service_names: Sequence[str]) -> None:
    """Lets grpcurl and its like list and describe `service_names`, and reflection itself."""
    names = (*service_names, reflection.SERVICE_NAME, V1_NAME)
    describe_v1()
    servicer = _ReflectionServicer(service_names=names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_registered_method_handlers(V1_NAME, handlers)  # pyright: ignore[reportAttributeAccessIssue]  the stub does not know it


class _ReflectionServicer(reflection.aio.ReflectionServicer):  # pyright: ignore[reportAttributeAccessIssue]  untyped library
    """Adds single methods, such as "tasuki.v1.RolloutService.Generate", which protobuf's symbol pool lacks."""

    def _file_containing_symbol(self, request: Any, symbol: str) -> Any:
        answer = super()._file_containing_symbol(request, symbol)
        service, _, _ = symbol.rpartition(".")
        if answer.HasField("error_response") and service in self._service_names:
            return super()._file_containing_symbol(request, service)
        return answer


def describe_v1() -> None:
    """Adds the v1 descriptor to the default pool; adding the same file again is harmless."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = "grpc.reflection.v1"
    for message in (*file.message_type, *(nested for outer in file.message_type for nested in outer.nested_type)):
        for field in (field for field in message.field if field.HasField("type_name")):
            field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
