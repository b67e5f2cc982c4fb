"""Server reflection, under the name v1alpha: grpcio-reflection has no v1 (grpc/grpc#38576), and clients fall back to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


def enable_reflection(server: grpc.aio.Server, *, service_names: Sequence[str]) -> None:
    """Lets grpcurl and its like list and describe `service_names`, and reflection itself."""
    servicer = _ReflectionServicer(service_names=(*service_names, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)


class _ReflectionServicer(reflection.aio.ReflectionServicer):  # pyright: ignore[reportAttributeAccessIssue]  untyped library
    """Adds single methods, such as "tasuki.v1.RolloutService.Generate", which protobuf's symbol pool lacks."""

    def _file_containing_symbol(self, request: Any, symbol: str) -> Any:
        answer = super()._file_containing_symbol(request, symbol)
        service, _, _ = symbol.rpartition(".")
        if answer.HasField("error_response") and service in self._service_names:
            return super()._file_containing_symbol(request, service)
        return answer
