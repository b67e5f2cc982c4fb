"""A stage begins only if there is room: needed bytes, free bytes, and the refusal. The services are fakes."""

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tasuki.config.schema import MemoryConfig, ModelConfig, NodeConfig, RolloutConfig
from tasuki.coordinator.admission import Admission
from tasuki.coordinator.journal import Journal
from tasuki.coordinator.memory_record import TAKES
from tasuki.coordinator.node import Node
from tasuki.memory.host import host_memory
from tasuki.wire.errors import DeadlineExceeded, OutOfGpuMemory
from tasuki.wire.stages import HOLDS, MemoryTag, Phase, Service, Stage
from tests.unit import fake_node
from tests.unit.fake_services import FakeServices
from tests.unit.sized_services import CONTEXT, GB, Devices, SizedServices


@pytest.fixture
def services() -> SizedServices:
    return SizedServices()


@pytest.fixture
def devices(services: SizedServices) -> Devices:
    services.devices = Devices(services)
    return services.devices


@pytest.fixture(autouse=True)
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves what is free now on this machine out of the count: only the budget limits a CPU."""
    memory = replace(host_memory(), total_bytes=200 * GB, available_bytes=200 * GB)
    monkeypatch.setattr("tasuki.coordinator.admission.host_memory", lambda: memory)


CPU_NODE = NodeConfig(
    state_dir=Path("/s"), model=ModelConfig(path=Path("/nowhere")), rollout=RolloutConfig(engine={"max_total_tokens": 600})
)
GPU_NODE = NodeConfig(state_dir=Path("/s"), device="cuda", model=ModelConfig(path=Path("/nowhere")))


def make_node(journal: Journal, services: FakeServices, devices: Devices, config: NodeConfig = GPU_NODE) -> Node:
    if config.device == "cpu":
        devices.device, devices.total_bytes = "cpu", 100 * GB
    admission = Admission(devices, config, published_bytes=journal.published_bytes)
    return fake_node.make_node(journal, services, admission=admission)


async def acquire(node: Node, phase: Phase) -> None:
    await fake_node.acquire(node, phase, uuid.uuid4().hex)


async def refused(node: Node, phase: Phase) -> OutOfGpuMemory:
    with pytest.raises(OutOfGpuMemory) as caught:
        await acquire(node, phase)
    assert caught.value.reason == "GPU_MEMORY"
    return caught.value


async def test_with_room_enough_every_stage_begins_and_both_services_are_asked_before_each_that_takes_memory(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    assert devices.asked == [*Service] * len(TAKES.keys() & {*fake_node.TO_ROLLOUT})
    devices.asked.clear()
    await acquire(node, Phase.TRAIN)
    assert devices.asked == [*Service] * len(TAKES.keys() & {*fake_node.TO_TRAIN})


async def test_stage_without_room_is_refused_with_numbers_before_anything_is_sent(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    devices.foreign_bytes = 3 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert ("run", Stage.RESUME_WEIGHTS) not in services.asked
    assert services.asked == [("run", Stage.LOAD_WEIGHTS), ("undo", Stage.LOAD_WEIGHTS)]
    assert Stage.of(node.state().stage) is HOLDS[Phase.TRAIN]
    assert {Stage.of(event.stage) for event in journal.events(journal.changeovers(limit=1)[0].changeover_id)} == {
        Stage.LOAD_WEIGHTS
    }
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
    assert Phase.of(node.state().phase) is Phase.ROLLOUT


async def test_foreign_holder_that_came_since_the_trainer_left_is_met_before_the_trainer_returns(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    devices.foreign_bytes = 4 * GB
    error = await refused(node, Phase.TRAIN)
    assert (error.metadata["stage"], error.metadata["tag"]) == ("LOAD_TRAINER", "weights,gradients,optimizer")
    assert ("run", Stage.LOAD_TRAINER) not in services.asked
    assert Stage.of(node.state().stage) is Stage.PAUSE_WEIGHTS  # past this point it only goes forwards
    devices.foreign_bytes = 0
    await acquire(node, Phase.TRAIN)
    assert Phase.of(node.state().phase) is Phase.TRAIN


@pytest.mark.parametrize(
    "cached",
    [{"cache_bytes": 9 * GB, "torch_cached_bytes": 2 * GB}, {"rollout_cached_bytes": 3 * GB}],
    ids=["trainer", "rollout"],
)
async def test_what_torch_gives_back_with_the_trainer_or_to_the_stages_own_service_counts_as_free(
    cached: dict[str, int], journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices)
    for name, num_bytes in cached.items():
        setattr(devices, name, num_bytes)
    await acquire(node, Phase.ROLLOUT)
    assert Phase.of(node.state().phase) is Phase.ROLLOUT


async def test_kv_cache_without_room_leads_back_to_train(journal: Journal, services: FakeServices, devices: Devices) -> None:
    node = make_node(journal, services, devices)
    devices.cache_bytes = 11 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert (error.metadata["stage"], error.metadata["tag"]) == ("RESUME_KV", "kv_cache")
    assert "lower rollout.kv_ratio or rollout.engine.max_total_tokens" in error.message
    undone = (Stage.SYNC, Stage.RESUME_WEIGHTS, Stage.OFFLOAD, Stage.LOAD_WEIGHTS)
    assert services.asked[-4:] == [("undo", stage) for stage in undone]
    assert Phase.of(node.state().phase) is Phase.TRAIN
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
    assert Phase.of(node.state().phase) is Phase.TRAIN


async def test_published_copy_that_leaves_with_the_trainer_is_taken_again(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    """The export tag is reported, although no stage of the coordinator names it."""
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


async def test_tags_that_stay_give_nothing_and_take_nothing(journal: Journal, services: FakeServices, devices: Devices) -> None:
    devices.staying = frozenset({(Service.TRAINER, MemoryTag.OPTIMIZER), (Service.ROLLOUT, MemoryTag.WEIGHTS)})
    devices.cache_bytes = 5 * GB
    node = make_node(journal, services, devices)
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    await acquire(node, Phase.ROLLOUT)
    moved = {Stage.of(event.stage): event.bytes for event in journal.events(journal.changeovers(limit=1)[0].changeover_id)}
    assert (moved[Stage.OFFLOAD], moved[Stage.RESUME_WEIGHTS], moved[Stage.RESUME_KV]) == (4 * GB, 0, 5 * GB)


async def test_budget_of_a_cpu_is_shared_by_both_services(journal: Journal, services: FakeServices, devices: Devices) -> None:
    tight = make_node(journal, services, devices, replace_budget(CPU_NODE, 9 * GB - 1))
    error = await refused(tight, Phase.ROLLOUT)
    assert (error.metadata["short_bytes"], error.metadata["stage"]) == ("1", "RESUME_WEIGHTS")
    assert f"raise memory.host_budget_bytes to {9 * GB}" in error.message
    assert Phase.of(tight.state().phase) is Phase.TRAIN
    raised = make_node(journal, services, devices, replace_budget(CPU_NODE, 9 * GB))
    await acquire(raised, Phase.ROLLOUT)
    await acquire(raised, Phase.TRAIN)
    assert Phase.of(raised.state().phase) is Phase.TRAIN


async def test_kv_cache_that_the_budget_does_not_hold_names_the_tokens_that_fit(
    journal: Journal, services: FakeServices, devices: Devices
) -> None:
    node = make_node(journal, services, devices, replace_budget(CPU_NODE, 9 * GB))
    devices.cache_bytes = 10 * GB
    error = await refused(node, Phase.ROLLOUT)
    assert "lower rollout.engine.max_total_tokens to 480 or less" in error.message  # 8 of 10 GB
    assert Phase.of(node.state().phase) is Phase.TRAIN


async def test_first_publication_needs_what_the_planner_says_and_later_ones_nothing(
    journal: Journal, services: FakeServices, devices: Devices, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096,'
        ' "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000,'
        ' "max_position_embeddings": 2048, "tie_word_embeddings": false}'
    )
    config = CPU_NODE.model_copy(update={"model": ModelConfig(path=tmp_path), "rollout": RolloutConfig()})
    node = make_node(journal, services, devices, replace_budget(config, 8 * GB))
    error = await refused(node, Phase.ROLLOUT)
    assert (error.metadata["stage"], error.metadata["tag"], services.asked) == ("LOAD_WEIGHTS", "export", [])
    num_parameters = 2 * 32000 * 1024 + 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024 + 3 * 1024) + 1024
    assert int(error.metadata["needed_bytes"]) == pytest.approx(2 * num_parameters, rel=0.01)
    roomy = replace_budget(config, 100 * GB)
    node = make_node(journal, services, devices, roomy)
    await acquire(node, Phase.ROLLOUT)
    await acquire(node, Phase.TRAIN)
    restarted = make_node(journal, services, devices, replace_budget(config, 9 * GB))
    await acquire(restarted, Phase.ROLLOUT)  # by the journal this trainer has its arena
    assert Phase.of(restarted.state().phase) is Phase.ROLLOUT


def replace_budget(config: NodeConfig, num_bytes: int) -> NodeConfig:
    return config.model_copy(update={"memory": MemoryConfig(host_budget_bytes=num_bytes)})
