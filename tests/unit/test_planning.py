"""The coordinator's Plan and `tasuki plan --json` give the same answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.arguments import make_parser
from tasuki.cli.plan import planned_node
from tasuki.cli.plan_report import as_table
from tasuki.config.schema import MemoryConfig, ModelConfig, NodeConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.planning import Planning, plan_to_proto
from tasuki.memory.host import host_memory
from tasuki.planner.advice import advise
from tasuki.planner.choose import choose
from tasuki.planner.node import MARGIN
from tasuki.planner.plan import Plan, plan
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.types_pb2 import DeviceUsage
from tasuki.wire.errors import DeadlineExceeded, PathNotFound, TasukiError
from tasuki.wire.stages import Service
from tests.choices import choices_for
from tests.unit.test_plan_cli import CONFIG


def as_the_command_line_says(answer: pb.PlanResponse) -> dict[str, Any]:
    """Returns the answer in the form of `tasuki plan --json`."""
    stages = [(stage.stage, {device.device: device for device in stage.devices}) for stage in answer.stages]
    return {
        "fits": answer.fits,
        "problems": list(answer.problems),
        "strategy": answer.strategy,
        "gpu_bytes": answer.gpu_bytes,
        "host_bytes": answer.host_bytes,
        "parameters": dict(answer.parameters),
        "gpu_peak": {"stage": answer.gpu_peak.stage, "bytes": answer.gpu_peak.bytes},
        "host_peak": {"stage": answer.host_peak.stage, "bytes": answer.host_peak.bytes},
        "kv_cache": {"tokens": answer.kv_cache_tokens, "bytes": answer.kv_cache_bytes},
        "stages": [
            {
                "stage": name,
                "gpus": [{part.part: part.bytes for part in device.parts} for key, device in devices.items() if key != "host"],
                "host": {part.part: part.bytes for part in devices["host"].parts},
            }
            for name, devices in stages
        ],
        "residency": [{"gpus": one.gpus, "stays": list(one.stays), "leaves": list(one.leaves)} for one in answer.residency],
        "expected_seconds": dict(answer.expected_seconds),
        "max_kv_ratio": answer.max_kv_ratio if answer.HasField("max_kv_ratio") else None,
        "ladder": [
            {name: getattr(rung, name) for name in ("setting", "old", "new", "gpu_peak_bytes", "fits")}
            for rung in answer.advice
        ],
    }


def planned_by(*arguments: str) -> Plan:
    return plan(choose(planned_node(make_parser().parse_args(["plan", *arguments]))))


@pytest.mark.parametrize("preset", ["balanced", "constrained"])
def test_answer_has_everything_that_the_command_line_prints(preset: str) -> None:
    planned = planned_by("--preset", preset, "--gpus", "4")
    advice = advise(planned)
    answer = pb.PlanResponse.FromString(plan_to_proto(planned, advice).SerializeToString())
    assert as_the_command_line_says(answer) == as_table(planned, advice)


def test_device_says_what_it_needs_what_it_has_and_whether_that_is_enough() -> None:
    planned = planned_by("--preset", "balanced", "--gpu-gb", "30")
    answer = plan_to_proto(planned, advise(planned))
    assert not answer.fits
    devices = {(stage.stage, device.device): device for stage in answer.stages for device in stage.devices}
    assert {device for _, device in devices} == {"host", *(f"cuda:{index}" for index in range(8))}
    for device in devices.values():
        assert device.needed_bytes == sum(part.bytes for part in device.parts)
        assert device.fits == (device.needed_bytes + MARGIN <= device.capacity_bytes)
    fullest = max((one for key, one in devices.items() if key[1] != "host"), key=lambda one: one.needed_bytes)
    assert (fullest.needed_bytes, fullest.capacity_bytes, fullest.fits) == (answer.gpu_peak.bytes, 30 * 10**9, False)
    assert answer.advice


class Memory:
    def __init__(self, answer: int | TasukiError) -> None:
        self.answer, self.num_asked = answer, 0

    async def usage(self, service: Service, *, skip_torch_cache: bool = False) -> GetUsageResponse:
        self.num_asked += 1
        if isinstance(self.answer, TasukiError):
            raise self.answer
        return GetUsageResponse(devices=[DeviceUsage(device="cuda:0", total_bytes=self.answer)])


def planning(memory: Memory, model: Path) -> Planning:
    config = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=model))
    return Planning(Admission(memory, config, published_bytes=lambda _: None), config, choices_for(config))


async def test_size_of_a_gpu_is_measured_once_and_the_answer_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    memory = Memory(24 * 10**9)
    made = planning(memory, tmp_path)
    first = await made.plan(pb.PlanRequest(host_bytes=10**12))
    assert (first.gpu_bytes, first.host_bytes) == (24 * 10**9, 10**12)
    memory.answer = DeadlineExceeded("busy")
    assert await made.plan(pb.PlanRequest(host_bytes=10**12)) is first
    assert memory.num_asked == 1
    assert (await made.plan(pb.PlanRequest(gpu_bytes=80 * 10**9, host_bytes=10**12))).gpu_bytes == 80 * 10**9


async def test_a_budget_is_for_tags_and_bounds_no_process_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = NodeConfig(
        state_dir=Path("/s"), device="cpu", model=ModelConfig(path=tmp_path), memory=MemoryConfig(host_budget_bytes=600_000_000)
    )
    made = Planning(Admission(Memory(1), config, published_bytes=lambda _: None), config, choices_for(config))
    answer = await made.plan(pb.PlanRequest())
    assert answer.host_bytes == host_memory().total_bytes
    assert not (await made.plan(pb.PlanRequest(host_bytes=600_000_000))).fits


async def test_size_that_nobody_tells_and_a_model_that_is_not_there_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="busy"):
        await planning(Memory(DeadlineExceeded("busy")), tmp_path).plan(pb.PlanRequest())
    with pytest.raises(PathNotFound):
        await planning(Memory(10**9), tmp_path / "nowhere").plan(pb.PlanRequest())
