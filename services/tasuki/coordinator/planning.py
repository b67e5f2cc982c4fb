"""Plan of this node on the wire and as JSON, and its memory as a metric."""

import asyncio
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict
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
        return ParseDict(plan_table(planned, advise(planned)), pb.PlanResponse())


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


def plan_table(planned: Plan, advice: Advice) -> dict[str, Any]:
    """The fields of a PlanResponse."""
    node, is_gpu = planned.node, planned.node.device == "cuda"
    return {
        "fits": planned.fits,
        "problems": planned.problems(),
        "strategy": node.strategy,
        "stages": [{"stage": stage.stage, "devices": _devices(planned, stage)} for stage in planned.stages],
        "gpu_peak": {"stage": planned.gpu_peak.stage, "bytes": planned.gpu_peak.gpu_bytes} if is_gpu else None,
        "host_peak": {"stage": planned.host_peak.stage, "bytes": planned.host_peak.host_bytes},
        "kv_cache_tokens": planned.kv_pool.num_tokens,
        "kv_cache_bytes": planned.kv_pool.num_bytes,
        "max_kv_ratio": advice.max_kv_ratio,
        "advice": [
            {name: getattr(rung, name) for name in ("setting", "old", "new")}
            | {"gpu_peak_bytes": rung.plan.gpu_peak.gpu_bytes, "fits": rung.plan.fits}
            for rung in advice.ladder
        ],
        "parameters": node.model.count_by_kind(),
        "gpu_bytes": node.gpu_bytes if is_gpu else None,
        "host_bytes": node.host_bytes,
        "residency": [{"gpus": name, "stays": stays, "leaves": leaves} for name, stays, leaves in stay_and_leave(node)],
        "expected_seconds": expected_seconds(planned),
    }


def _devices(planned: Plan, stage: StagePlan) -> list[dict[str, Any]]:
    node = planned.node
    gpus = enumerate(stage.gpus) if node.device == "cuda" else ()
    devices = [("host", stage.host, node.host_bytes), *((f"cuda:{i}", parts, node.gpu_bytes) for i, parts in gpus)]
    return [
        {
            "device": name,
            "needed_bytes": (needed := sum(parts.values())),
            "capacity_bytes": capacity,
            "fits": needed + MARGIN <= capacity,
            "parts": [{"part": part, "bytes": size} for part, size in sorted(parts.items(), key=lambda item: -item[1])],
        }
        for name, parts, capacity in devices
    ]
