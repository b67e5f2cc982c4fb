"""A stage begins only where there is room: what it needs, what is free, and what the refusal says; the services are fakes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tasuki.config.schema import MemoryConfig, ModelConfig, NodeConfig, RolloutConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.headroom import Shortage, refusal
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.node import Node
from tasuki.coordinator.phases import HOLDS, RULES, Phase, Service, Stage
from tasuki.coordinator.records import Intent, Outcome, StageEvent
from tasuki.memory.tags import DeviceUsage, MemoryTag, ServiceUsage, TagUsage
from tasuki.wire.errors import DeadlineExceeded, OutOfGpuMemory, TasukiError
from tests.unit import fake_node
from tests.unit.fake_services import FakeServices

GB = 10**9
CONTEXT = GB // 10
PUBLISHED = 100  # by the fake trainer


@dataclass
class Devices:
    """The memory behind fake services: tags that are mapped while their service holds the device, and whoever else is there."""

    services: FakeServices
    device: str = "cuda:0"
    total_bytes: int = 12 * GB
    cache_bytes: int = 6 * GB
    copy_bytes: int = 0
    """Of a published copy that is there from LOAD_WEIGHTS to OFFLOAD."""
    foreign_bytes: int = 0
    torch_cached_bytes: int = 0
    silent: dict[Service, TasukiError] = field(default_factory=dict)
    asked: list[Service] = field(default_factory=list)

    def sizes(self, service: Service) -> dict[MemoryTag, int]:
        if service is Service.TRAINER:
            return {MemoryTag.WEIGHTS: 2 * GB, MemoryTag.GRADIENTS: 2 * GB, MemoryTag.OPTIMIZER: 4 * GB}
        return {MemoryTag.WEIGHTS: 1 * GB, MemoryTag.KV_CACHE: self.cache_bytes}

    def awake(self, service: Service) -> set[MemoryTag]:
        at = self.services.stage[service]
        if service is Service.TRAINER:
            return set() if at is Stage.OFFLOAD else set(self.sizes(service))
        has_weights = at not in (None, Stage.PAUSE_WEIGHTS)
        tags = {MemoryTag.WEIGHTS} if has_weights else set()
        return tags | ({MemoryTag.KV_CACHE} if at in (Stage.RESUME_KV, Stage.DRAIN) else set())

    def mapped(self, service: Service) -> int:
        return sum(self.sizes(service)[tag] for tag in self.awake(service))

    async def usage(self, service: Service) -> ServiceUsage:
        self.asked.append(service)
        await asyncio.sleep(0)
        if service in self.silent:
            raise self.silent[service]
        processes = {each: self.mapped(each) + CONTEXT for each in Service}
        processes[Service.TRAINER] += self.torch_cached_bytes if self.awake(Service.TRAINER) else 0
        free = self.total_bytes - sum(processes.values()) - self.foreign_bytes
        awake = self.awake(service)
        tags = tuple(
            TagUsage(tag, self.device, size if tag in awake else 0, size, tag not in awake, 0, 0)
            for tag, size in self.sizes(service).items()
        )
        if service is Service.TRAINER and self.copy_bytes:
            mapped = self.copy_bytes if self.services.stage[service] is Stage.LOAD_WEIGHTS else 0
            tags += (TagUsage("export", self.device, mapped, self.copy_bytes, not mapped, 0, 0),)
        others = self.total_bytes - free - processes[service]
        return ServiceUsage(tags, (DeviceUsage(self.device, 0, self.total_bytes, free, processes[service], 0, others),))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_epoch("boot-1")
    yield journal
    journal.close()


class SizedServices(FakeServices):
    """Fakes that say how much a stage moved."""

    devices: Devices

    async def run(self, intent: Intent, *, published: bytes) -> Outcome:
        service = RULES[intent.stage].service
        before = self.devices.mapped(service)
        outcome = await super().run(intent, published=published)
        moved = abs(self.devices.mapped(service) - before)
        return replace(outcome, num_bytes=PUBLISHED if intent.stage is Stage.LOAD_WEIGHTS else moved)


@pytest.fixture
def services() -> SizedServices:
    return SizedServices()


@pytest.fixture
def devices(services: SizedServices) -> Devices:
    services.devices = Devices(services)
    return services.devices


def make_node(journal: Journal, services: FakeServices, devices: Devices, config: NodeConfig | None = None) -> Node:
    if config is None:
        config = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=Path("/nowhere")))
    admission = Admission(devices, config, published_bytes=journal.published_bytes)
    return fake_node.make_node(journal, services, admission=admission)


async def acquire(node: Node, phase: Phase) -> list[StageEvent]:
    operation = node.acquire(phase, uuid.uuid4().hex)
    return [told.event async for told in operation.follow()]


async def refused(node: Node, phase: Phase) -> OutOfGpuMemory:
    with pytest.raises(OutOfGpuMemory) as caught:
        await acquire(node, phase)
    assert caught.value.reason == "GPU_MEMORY"
    return caught.value


async def test_with_room_enough_every_stage_begins_and_memory_is_read_once_a_changeover(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    assert devices.asked == [*Service] * 2  # nothing was known yet, and then the trainer had made what it publishes
    for _ in range(3):
        devices.asked.clear()
        await acquire(node, Phase.TRAIN)
        assert devices.asked == [Service.TRAINER]
        await acquire(node, Phase.ROLLOUT)
        assert devices.asked == [Service.TRAINER, Service.ROLLOUT]
    assert node.state().num_changeovers == 7


async def test_stage_without_room_is_refused_with_numbers_before_anything_is_sent(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    devices.foreign_bytes = 3 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert ("run", Stage.RESUME_WEIGHTS) not in services.asked
    assert services.asked == [("run", Stage.LOAD_WEIGHTS), ("undo", Stage.LOAD_WEIGHTS)]
    assert node.state().at is HOLDS[Phase.TRAIN]
    assert {event.stage for event in journal.changeovers(limit=1)[0].events} == {Stage.LOAD_WEIGHTS}
    free = 12 * GB - 3 * GB - 8 * GB - 2 * CONTEXT
    numbers = {key: int(error.metadata[key]) for key in ("needed_bytes", "free_bytes", "margin_bytes", "short_bytes")}
    margin = 512 * 2**20
    assert numbers == {"needed_bytes": GB, "free_bytes": free, "margin_bytes": margin, "short_bytes": GB + margin - free}
    assert (error.metadata["stage"], error.metadata["tag"], error.metadata["device"]) == ("RESUME_WEIGHTS", "weights", "cuda:0")
    held = dict(one.split("=") for one in error.metadata["held"].split("; "))
    assert (held["trainer optimizer"], held["others"]) == (str(4 * GB), str(3 * GB))
    assert held["contexts and caches of this node"] == str(2 * CONTEXT)
    assert "end other programs that hold memory of cuda:0" in error.message
    assert "cuda:0: 1.00 GB needed, 0.80 GB free, 0.74 GB short" in error.message
    devices.foreign_bytes = 0
    await acquire(node, Phase.ROLLOUT)
    assert node.state().phase is Phase.ROLLOUT


async def test_foreign_holder_that_came_since_the_trainer_left_is_met_before_the_trainer_returns(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    devices.foreign_bytes = 4 * GB
    error = await refused(node, Phase.TRAIN)
    assert (error.metadata["stage"], error.metadata["tag"]) == ("LOAD_TRAINER", "weights,gradients,optimizer")
    assert ("run", Stage.LOAD_TRAINER) not in services.asked
    assert node.state().at is Stage.PAUSE_WEIGHTS  # from here the only way is forwards
    devices.foreign_bytes = 0
    await acquire(node, Phase.TRAIN)
    assert node.state().phase is Phase.TRAIN


async def test_what_torch_gives_back_with_the_trainer_counts_when_it_is_needed(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    """Reckoned there is too little for the KV cache; measured there is enough."""
    node = make_node(journal, services, devices)
    devices.cache_bytes, devices.torch_cached_bytes = 9 * GB, 2 * GB
    await acquire(node, Phase.ROLLOUT)
    assert node.state().phase is Phase.ROLLOUT
    assert devices.asked == [*Service] * 3


async def test_kv_cache_without_room_leads_back_to_train(journal: Journal, services: FakeServices, devices: Devices) -> None:
    node = make_node(journal, services, devices)
    devices.cache_bytes = 11 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert (error.metadata["stage"], error.metadata["tag"]) == ("RESUME_KV", "kv_cache")
    assert "lower rollout.kv_ratio or rollout.max_total_tokens" in error.message
    undone = (Stage.SYNC, Stage.RESUME_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_WEIGHTS)
    assert services.asked[-4:] == [("undo", stage) for stage in undone]
    assert node.state().phase is Phase.TRAIN
    assert node.state().last_error.startswith("GPU_MEMORY: RESUME_KV was not begun")


@pytest.mark.parametrize("silent", [[Service.ROLLOUT], [Service.TRAINER], [Service.ROLLOUT, Service.TRAINER]])
async def test_service_that_does_not_say_what_it_holds_is_no_reason_to_refuse(
    journal: Journal, services: FakeServices, devices: Devices, silent: list[Service]
) -> None:
    node = make_node(journal, services, devices)
    devices.foreign_bytes = 3 * GB
    devices.silent = {service: DeadlineExceeded("busy") for service in silent}
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    assert node.state().phase is Phase.TRAIN


async def test_on_a_cpu_nobody_is_asked_once_both_have_told_what_they_hold(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    devices.device = "cpu"
    devices.cache_bytes = GB // 1000
    config = NodeConfig(state_dir=Path("/s"), model=ModelConfig(path=Path("/nowhere")))
    node = make_node(journal, services, devices, config)
    for _ in range(3):
        await acquire(node, Phase.ROLLOUT)
        await acquire(node, Phase.TRAIN)
    assert devices.asked == [*Service] * 2


async def test_tag_that_has_grown_is_noticed_by_the_bytes_that_a_stage_moves(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    await acquire(node, Phase.ROLLOUT)
    devices.asked.clear()
    devices.cache_bytes += GB
    await acquire(node, Phase.TRAIN)
    devices.cache_bytes = 12 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert (error.metadata["stage"], error.metadata["needed_bytes"]) == ("RESUME_KV", str(12 * GB))


async def test_published_copy_that_leaves_with_the_trainer_is_taken_again(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    """As its own tag, which no stage of the coordinator names."""
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    devices.copy_bytes = GB
    await acquire(node, Phase.TRAIN)
    devices.foreign_bytes = 12 * GB - 8 * GB - 2 * CONTEXT
    error = await refused(node, Phase.ROLLOUT)
    assert (error.metadata["stage"], error.metadata["tag"], error.metadata["needed_bytes"]) == (
        "LOAD_WEIGHTS",
        "export",
        str(GB),
    )
    devices.foreign_bytes = 0
    await acquire(node, Phase.ROLLOUT)


async def test_budget_of_a_cpu_is_shared_by_both_services(journal: Journal, services: FakeServices, devices: Devices) -> None:
    devices.device, devices.total_bytes = "cpu", 100 * GB
    config = NodeConfig(
        state_dir=Path("/s"), model=ModelConfig(path=Path("/nowhere")), rollout=RolloutConfig(max_total_tokens=600)
    )

    def with_budget(num_bytes: int) -> NodeConfig:
        return config.model_copy(update={"memory": MemoryConfig(host_budget_bytes=num_bytes)})

    tight = make_node(journal, services, devices, with_budget(9 * GB - 1))
    error = await refused(tight, Phase.ROLLOUT)
    assert (error.metadata["short_bytes"], error.metadata["stage"]) == ("1", "RESUME_WEIGHTS")
    assert f"raise memory.host_budget_bytes to {9 * GB}" in error.message
    assert tight.state().phase is Phase.TRAIN
    raised = make_node(journal, services, devices, with_budget(9 * GB))
    await acquire(raised, Phase.ROLLOUT)
    await acquire(raised, Phase.TRAIN)
    assert raised.state().phase is Phase.TRAIN


async def test_kv_cache_that_the_budget_does_not_hold_names_the_tokens_that_fit(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    devices.device, devices.total_bytes = "cpu", 100 * GB
    config = NodeConfig(
        state_dir=Path("/s"),
        model=ModelConfig(path=Path("/nowhere")),
        rollout=RolloutConfig(max_total_tokens=600),
        memory=MemoryConfig(host_budget_bytes=9 * GB),
    )
    node = make_node(journal, services, devices, config)
    devices.cache_bytes = 10 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert "lower rollout.max_total_tokens to 480 or less" in error.message  # 8 of 10 GB
    assert node.state().phase is Phase.TRAIN


async def test_first_publication_needs_what_the_planner_says_and_later_ones_nothing(
    journal: Journal, services: FakeServices, devices: Devices, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096,'
        ' "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000,'
        ' "max_position_embeddings": 2048, "tie_word_embeddings": false}'
    )
    devices.device, devices.total_bytes = "cpu", 100 * GB
    config = NodeConfig(state_dir=Path("/s"), model=ModelConfig(path=tmp_path), memory=MemoryConfig(host_budget_bytes=8 * GB))
    node = make_node(journal, services, devices, config)
    error = await refused(node, Phase.ROLLOUT)
    assert (error.metadata["stage"], error.metadata["tag"], services.asked) == ("LOAD_WEIGHTS", "export", [])
    num_parameters = 2 * 32000 * 1024 + 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024 + 3 * 1024) + 1024
    assert int(error.metadata["needed_bytes"]) == pytest.approx(2 * num_parameters, rel=0.01)
    roomy = replace_budget(config, 100 * GB)
    node = make_node(journal, services, devices, roomy)
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    restarted = make_node(journal, services, devices, replace_budget(config, 9 * GB))
    await acquire(restarted, Phase.ROLLOUT)  # the journal says that this trainer has its arena
    assert restarted.state().phase is Phase.ROLLOUT


def replace_budget(config: NodeConfig, num_bytes: int) -> NodeConfig:
    return config.model_copy(update={"memory": MemoryConfig(host_budget_bytes=num_bytes)})


async def test_memory_of_a_service_that_was_started_anew_is_asked_for_anew(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    services.kill(Service.ROLLOUT)
    services.start(Service.ROLLOUT)
    devices.asked.clear()
    await acquire(node, Phase.ROLLOUT)
    assert set(devices.asked) == set(Service)
    assert node.state().phase is Phase.ROLLOUT


async def test_stage_by_hand_is_refused_as_well_and_goes_on_when_there_is_room(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    devices.foreign_bytes = 3 * GB

    async def run(stage: Stage) -> None:
        async for _ in node.run_stage(stage, f"{stage} {len(node._operations)}").follow():
            pass

    await run(Stage.LOAD_WEIGHTS)
    with pytest.raises(OutOfGpuMemory):
        await run(Stage.RESUME_WEIGHTS)
    assert node.state().at is Stage.LOAD_WEIGHTS
    devices.foreign_bytes = 0
    await run(Stage.RESUME_WEIGHTS)
    assert node.state().at is Stage.RESUME_WEIGHTS


def test_message_about_many_devices_stays_short() -> None:
    config = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=Path("/m")))
    room = Shortage("cuda:0", 9 * GB, 2 * GB, 0, {"others": 3 * GB})
    rooms = [replace(room, device=f"cuda:{index}", needed_bytes=(9 + index) * GB) for index in range(16)]
    error = refusal(Stage.RESUME_KV, rooms, tags=[MemoryTag.KV_CACHE], config=config)
    assert error.metadata["device"] == "cuda:15"
    assert "12 more devices" in error.message
    assert len(error.message) < 1000
