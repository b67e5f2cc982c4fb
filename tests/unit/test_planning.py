"""The coordinator's Plan."""

import json
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict

from tasuki.cli.arguments import make_parser
from tasuki.cli.plan import planned_node
from tasuki.config.schema import MemoryConfig, ModelConfig, NodeConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.planning import Planning, plan_table
from tasuki.memory.host import host_memory
from tasuki.planner.advice import advise
from tasuki.planner.choose import choose
from tasuki.planner.node import MARGIN
from tasuki.planner.plan import plan
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.types_pb2 import DeviceUsage
from tasuki.wire.errors import DeadlineExceeded, PathNotFound, TasukiError
from tasuki.wire.stages import Service
from tests.choices import choices_for
from tests.unit.test_plan_cli import CONFIG


def test_device_says_what_it_needs_what_it_has_and_whether_that_is_enough() -> None:
    arguments = make_parser().parse_args(["plan", "--preset", "balanced", "--gpu-gb", "30"])
    planned = plan(choose(planned_node(arguments)))
    answer = ParseDict(plan_table(planned, advise(planned)), pb.PlanResponse())
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
