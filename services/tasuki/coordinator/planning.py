"""Plan of this node on the wire, as `tasuki plan --json` prints it, and its memory as a metric."""

import asyncio
from collections.abc import Mapping

from prometheus_client.core import GaugeMetricFamily

from tasuki.config.choices import Choices
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.phases import phase_of
from tasuki.memory.host import host_memory
from tasuki.planner.advice import Advice, advise
from tasuki.planner.choose import plan_node
from tasuki.planner.node import MARGIN, Part
from tasuki.planner.plan import Plan, StagePlan
from tasuki.planner.residency import expected_seconds, stay_and_leave
from tasuki.rpc.metrics import MEMORY_PLANNED
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.wire.stages import MemoryTag, Service, Stage

PART_TAGS: Mapping[str, tuple[Service, MemoryTag]] = {
    Part.TRAINER_WEIGHTS: (Service.TRAINER, MemoryTag.WEIGHTS),
    Part.GRADIENTS: (Service.TRAINER, MemoryTag.GRADIENTS),
    Part.OPTIMIZER: (Service.TRAINER, MemoryTag.OPTIMIZER),
    Part.EXPORT: (Service.TRAINER, MemoryTag.EXPORT),
    Part.ROLLOUT_WEIGHTS: (Service.ROLLOUT, MemoryTag.WEIGHTS),
    Part.KV_CACHE: (Service.ROLLOUT, MemoryTag.KV_CACHE),
    Part.CUDA_GRAPH: (Service.ROLLOUT, MemoryTag.CUDA_GRAPH),
}
"""The tag that each part of a plan is measured as."""
# The planner needs a GPU size, but ignores it on a CPU.
_NO_GPU = 1


class Planning:
    """Plans the node's configuration once for each size of its devices, in a thread, so that changeovers continue."""

    def __init__(self, admission: Admission, config: NodeConfig, choices: Choices) -> None:
        self._admission, self._config, self._choices = admission, config, choices
        self._made: dict[tuple[int, int], pb.PlanResponse] = {}
        self._turn = asyncio.Lock()

    async def plan(self, request: pb.PlanRequest) -> pb.PlanResponse:
        """Plans for the request's sizes; those missing are the node's. Raises as plan_node, and if a GPU's size cannot be read."""
        if self._config.device == "cpu":
            gpu_bytes = _NO_GPU
        else:
            gpu_bytes = request.gpu_bytes if request.HasField("gpu_bytes") else await self._admission.gpu_bytes()
        sizes = (gpu_bytes, request.host_bytes if request.HasField("host_bytes") else host_memory().total_bytes)
        async with self._turn:
            if sizes not in self._made:
                self._made = {sizes: await asyncio.to_thread(self._plan, *sizes)}
            return self._made[sizes]

    def _plan(self, gpu_bytes: int, host_bytes: int) -> pb.PlanResponse:
        planned = plan_node(self._config, gpu_bytes=gpu_bytes, host_bytes=host_bytes, choices=self._choices)
        return plan_to_proto(planned, advise(planned))


def planned_memory(plan: pb.PlanResponse | None, at: Stage | None, *, device: str) -> GaugeMetricFamily:
    """Planned bytes at `at`, or the peak of the phase that it completes; empty while stage or plan is unknown."""
    family = MEMORY_PLANNED.gauges()
    name = None if at is None else phase_of(at) or at
    for planned in (planned for stage in (plan.stages if plan else ()) if stage.stage == name for planned in stage.devices):
        # On a CPU the measured memory is the host's, under the name of torch's device.
        place = "cpu" if planned.device == "host" and device == "cpu" else planned.device
        for part in planned.parts:
            service, tag = PART_TAGS.get(part.part, ("", part.part))
            family.add_metric([service, tag, place], part.bytes)
    return family


def plan_to_proto(planned: Plan, advice: Advice) -> pb.PlanResponse:
    node, is_gpu = planned.node, planned.node.device == "cuda"
    response = pb.PlanResponse(
        fits=planned.fits,
        problems=planned.problems(),
        strategy=node.strategy,
        stages=[_stage(planned, stage) for stage in planned.stages],
        host_peak=pb.PlannedPeak(stage=planned.host_peak.stage, bytes=planned.host_peak.host_bytes),
        kv_cache_tokens=planned.kv_pool.num_tokens,
        kv_cache_bytes=planned.kv_pool.num_bytes,
        max_kv_ratio=advice.max_kv_ratio,
        advice=[
            pb.PlannedChange(
                setting=rung.setting,
                old=rung.old,
                new=rung.new,
                gpu_peak_bytes=rung.plan.gpu_peak.gpu_bytes,
                fits=rung.plan.fits,
            )
            for rung in advice.ladder
        ],
        parameters=node.model.count_by_kind(),
        host_bytes=node.host_bytes,
        residency=[pb.PlannedResidency(gpus=name, stays=stays, leaves=leaves) for name, stays, leaves in stay_and_leave(node)],
        expected_seconds=expected_seconds(planned),
    )
    if is_gpu:
        response.gpu_bytes = node.gpu_bytes
        response.gpu_peak.CopyFrom(pb.PlannedPeak(stage=planned.gpu_peak.stage, bytes=planned.gpu_peak.gpu_bytes))
    return response


def _stage(planned: Plan, stage: StagePlan) -> pb.PlannedStage:
    node = planned.node
    devices = [_device("host", stage.host, node.host_bytes)]
    if node.device == "cuda":
        devices += [_device(f"cuda:{i}", parts, node.gpu_bytes) for i, parts in enumerate(stage.gpus)]
    return pb.PlannedStage(stage=stage.stage, devices=devices)


def _device(name: str, parts: Mapping[Part, int], capacity_bytes: int) -> pb.PlannedDevice:
    needed = sum(parts.values())
    return pb.PlannedDevice(
        device=name,
        needed_bytes=needed,
        capacity_bytes=capacity_bytes,
        fits=needed + MARGIN <= capacity_bytes,
        parts=[pb.PlannedPart(part=part, bytes=size) for part, size in sorted(parts.items(), key=lambda item: -item[1])],
    )
