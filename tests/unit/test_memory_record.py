"""Memory over time: the coordinator's records, and the dashboard's view of them with the journal and the plan."""

import json
from pathlib import Path

import pytest

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.memory_record import MemoryRecord
from tasuki.coordinator.node import Node
from tasuki.dashboard.journal import JournalTail
from tasuki.dashboard.memory import MemoryTimeline, read_plan
from tasuki.wire.stages import HOLDS, Phase, Service
from tests.unit import fake_node
from tests.unit.fake_node import acquire
from tests.unit.fake_services import FakeServices
from tests.unit.sized_services import GB, Devices, SizedServices

RECORDED = Path(__file__).parents[1] / "recorded_run"


@pytest.fixture
def services() -> SizedServices:
    return SizedServices()


@pytest.fixture
def devices(services: SizedServices) -> Devices:
    services.devices = Devices(services)
    return services.devices


def make_node(journal: Journal, services: FakeServices, devices: Devices, record: Path) -> Node:
    config = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=Path("/nowhere")))
    admission = Admission(devices, config, published_bytes=journal.published_bytes, record=MemoryRecord(record))
    return fake_node.make_node(journal, services, admission=admission)


async def test_a_line_is_written_for_what_is_new_and_the_journal_moves_the_tags(
    journal: Journal, services: FakeServices, devices: Devices, tmp_path: Path
) -> None:
    record = tmp_path / "memory.jsonl"
    node = make_node(journal, services, devices, record)
    for number in range(3):
        await acquire(node, Phase.ROLLOUT, f"r{number}")
        await acquire(node, Phase.TRAIN, f"t{number}")
    assert len(record.read_text().splitlines()) == 1
    devices.cache_bytes = 3 * GB
    reported = [(await devices.usage(service)).devices[0].process_bytes for service in Service]
    devices.asked.clear()
    await acquire(node, Phase.ROLLOUT, "r3")
    assert len(record.read_text().splitlines()) == 2
    with record.open("a") as lines:
        lines.write('{"time": 5\nnull\n{"time": 1e999, "tags": [{}], "device_bytes": {}}\n{"tags": ')
    timeline = MemoryTimeline(record)
    assert timeline.advance()
    window = timeline.window(JournalTail(tmp_path / "journal.sqlite").finished_stages(changeovers=3), plan=None)
    (device,) = window["devices"]
    assert (device["device"], device["total_bytes"]) == ("cuda:0", 12 * GB)
    assert device["process_bytes"] == sum(reported) > 0
    by_tag = {(one["service"], one["tag"]): one["bytes"] for one in device["series"]}
    at = {stage: index for index, stage in enumerate(window["stages"])}  # the last time
    assert by_tag["trainer", "optimizer"][at[HOLDS[Phase.TRAIN]]] == 4 * GB
    assert by_tag["trainer", "optimizer"][at["OFFLOAD"]] == 0
    assert by_tag["rollout", "kv_cache"][at["OFFLOAD"]] == 0
    assert by_tag["rollout", "kv_cache"][at["RESUME_KV"]] == 3 * GB
    assert by_tag["rollout", "weights"][at["PAUSE_WEIGHTS"]] == 0


async def test_the_file_stays_below_its_bound(devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasuki.coordinator.memory_record._MAX_BYTES", 3000)
    record = MemoryRecord(tmp_path / "memory.jsonl")
    usages = {service: await devices.usage(service) for service in Service}
    for size in range(20):
        for tag in usages[Service.ROLLOUT].tags:
            tag.total_bytes = 10**9 + size
        record.note(usages)
    lines = (tmp_path / "memory.jsonl").read_bytes()
    assert 1500 < len(lines) <= 3000 and lines.endswith(b"\n")
    assert all(json.loads(line) for line in lines.splitlines())


def test_a_recorded_run_has_memory_beside_its_plan() -> None:
    timeline = MemoryTimeline(RECORDED / "memory.jsonl")
    assert timeline.advance()
    plan = read_plan(RECORDED / "logs" / "node.toml", timeline.device_bytes())
    window = timeline.window(JournalTail(RECORDED / "journal.sqlite").finished_stages(changeovers=4), plan=plan)
    (device,) = window["devices"]
    planned = window["plan"]["cpu"]
    assert len(window["times"]) == len(planned["tags"]) == 18
    mapped = [sum(one["bytes"][index] for one in device["series"]) for index in range(18)]
    assert all(
        0 < size <= tags
        for size, tags, stage in zip(mapped, planned["tags"], window["stages"], strict=True)
        if stage in ("RESUME_KV", "LOAD_TRAINER")
    )
    assert all(tags < total for tags, total in zip(planned["tags"], planned["total"], strict=True))
