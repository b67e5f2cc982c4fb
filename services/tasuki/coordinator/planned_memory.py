"""Planned memory of each device at the node's current stage, with the labels of the measured memory."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import GaugeMetricFamily

from tasuki.coordinator.phases import phase_of
from tasuki.coordinator.planning import Planning
from tasuki.planner.layout import Part
from tasuki.rpc.metric_names import MEMORY_PLANNED
from tasuki.v1.coordinator_pb2 import PlannedDevice, PlanResponse
from tasuki.wire.stages import MemoryTag, Service, Stage

TAGS: Mapping[str, tuple[Service, MemoryTag]] = {
    Part.TRAINER_WEIGHTS: (Service.TRAINER, MemoryTag.WEIGHTS),
    Part.GRADIENTS: (Service.TRAINER, MemoryTag.GRADIENTS),
    Part.OPTIMIZER: (Service.TRAINER, MemoryTag.OPTIMIZER),
    Part.EXPORT: (Service.TRAINER, MemoryTag.EXPORT),
    Part.ROLLOUT_WEIGHTS: (Service.ROLLOUT, MemoryTag.WEIGHTS),
    Part.KV_CACHE: (Service.ROLLOUT, MemoryTag.KV_CACHE),
    Part.CUDA_GRAPH: (Service.ROLLOUT, MemoryTag.CUDA_GRAPH),
}
"""The tag that each part of a plan is measured as."""
_HOST = "host"


class PlannedMemory:
    """The node's plan, made once."""

    def __init__(self, planning: Planning, *, device: str) -> None:
        self._planning, self._device = planning, device
        self._plan: PlanResponse | None = None

    async def read(self) -> None:
        """Makes the plan. Raises TasukiError if none can be made now."""
        if self._plan is None:
            self._plan = await self._planning.plan(gpu_bytes=None, host_bytes=None)

    def family(self, at: Stage | None) -> GaugeMetricFamily:
        """Planned bytes at `at`, or the peak of the phase that it completes; empty while stage or plan is unknown."""
        family = MEMORY_PLANNED.gauges()
        if self._plan is None or at is None:
            return family
        name = phase_of(at) or at
        for stage in self._plan.stages:
            if stage.stage == name:
                for device in stage.devices:
                    self._add(family, device)
        return family

    def _add(self, family: GaugeMetricFamily, device: PlannedDevice) -> None:
        # On a CPU the measured memory is the host's, under the name of torch's device.
        name = "cpu" if device.device == _HOST and self._device == "cpu" else device.device
        for part in device.parts:
            service, tag = TAGS.get(part.part, ("", part.part))
            family.add_metric([service, tag, name], part.bytes)
