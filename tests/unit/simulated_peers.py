"""The coordinator's peers over a simulated network."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tasuki.coordinator.changeover import Peers
from tasuki.wire.stages import Service

if TYPE_CHECKING:
    from tests.unit.simulated_node import SimulatedNode

STAGE_TIMEOUT_S = 60.0


class _Stub:
    """Replaces a gRPC stub."""

    def __init__(self, node: SimulatedNode, service: Service) -> None:
        self._node, self._service = node, service

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return lambda request, timeout: self._node.call(self._service, method, request, timeout)


class SimulatedPeers(Peers):
    """The coordinator's peers, with stubs that call the simulation."""

    def __init__(self, node: SimulatedNode) -> None:
        self._trainer = self._rollout = None
        self._memory = {service: _Stub(node, service) for service in Service}
        self._trainer, self._rollout = self._memory[Service.TRAINER], self._memory[Service.ROLLOUT]
        self._epoch, self._timeout_s, self._drain_grace_s = node.epoch, STAGE_TIMEOUT_S, 10.0
