"""A budget of host memory counts whole chunks; a node that does not fit is refused before anything starts."""

import json
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tasuki.config.schema import MemoryConfig, ModelConfig, NodeConfig, RolloutConfig
from tasuki.config.trainer_schema import TrainerConfig
from tasuki.coordinator.admission import Admission
from tasuki.memory.host import HostMemory
from tasuki.node import choose
from tasuki.node.choose import check_host_budget, check_host_ranks
from tasuki.node.start import start_node
from tasuki.trainer.backends.fsdp.memory import FsdpMemory
from tasuki.trainer.resident_tags import ExportChoice
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.types_pb2 import DeviceUsage, TagUsage
from tasuki.weights.export import ExportMemory, WeightExport
from tasuki.wire.errors import InvalidArgument, OutOfGpuMemory
from tasuki.wire.stages import MemoryTag, Service, Stage
from tests.unit.test_plan_cli import CONFIG

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def config_of(model: Path, *, budget_bytes: int) -> NodeConfig:
    """A node that publishes its parameters in place, except those below 2 KiB, which are in no arena."""
    return NodeConfig(
        state_dir=Path("/nowhere"),
        device="cpu",
        model=ModelConfig(path=model),
        trainer=TrainerConfig(num_ranks=2, compute_dtype="float32"),
        rollout=RolloutConfig(dtype="float32", context_length=64, engine={"max_total_tokens": 1024}),
        memory=MemoryConfig(host_budget_bytes=budget_bytes),
    )


class Trainer:
    """The trainer's three tags, with one chunk each on two ranks; rollout sleeps."""

    async def usage(self, service: Service, *, skip_torch_cache: bool = False) -> GetUsageResponse:
        sizes = {MemoryTag.WEIGHTS: 2 * MIB, MemoryTag.GRADIENTS: 2 * MIB, MemoryTag.OPTIMIZER: 2 * MIB}
        tags = [
            TagUsage(tag=tag.number, device="cpu", mapped_bytes=size, total_bytes=size)
            for tag, size in sizes.items()
            for _ in range(2)
        ]
        device = DeviceUsage(device="cpu", total_bytes=64 * 10**9, free_bytes=32 * 10**9)
        return GetUsageResponse(tags=tags if service is Service.TRAINER else [], devices=[device])


@pytest.mark.parametrize(("budget_bytes", "short"), [(13_500_000, 3_277_216), (16 * MIB, 0)])
async def test_first_publication_counts_the_chunks_of_what_is_too_small_for_an_arena(
    budget_bytes: int, short: int, model: Path
) -> None:
    admission = Admission(Trainer(), config_of(model, budget_bytes=budget_bytes), published_bytes=lambda boot_id: None)
    if not short:
        await admission.admit(Stage.LOAD_WEIGHTS, trainer_boot_id="t")
        return
    with pytest.raises(OutOfGpuMemory) as refused:
        await admission.admit(Stage.LOAD_WEIGHTS, trainer_boot_id="t")
    told = refused.value.metadata
    assert (told["tag"], told["needed_bytes"], told["short_bytes"]) == ("export", str(4 * MIB), str(short))


def test_a_budget_that_does_not_hold_what_a_rank_makes_at_its_start_is_refused_before_the_start(model: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_host_budget(config_of(model, budget_bytes=4_000_000))
    assert refused.value.metadata == {"field": "memory.host_budget_bytes", "needed_bytes": str(12 * MIB)}
    assert "trainer weights 2097152, gradients 2097152, optimizer 2097152" in refused.value.message
    check_host_budget(config_of(model, budget_bytes=12 * MIB))


def test_a_first_publication_without_room_names_its_tag(mesh: DeviceMesh) -> None:
    memory = FsdpMemory(mesh, ExportChoice(of_parameters=True, stays=False))

    def make(where: ExportMemory) -> WeightExport:
        raise OutOfGpuMemory("cpu needs 2.00 MiB", tag="export", needed_bytes=2 * MIB, free_bytes=MIB, device="cpu")

    with pytest.raises(OutOfGpuMemory, match="trainer rank 0 needs 2097152 bytes for export; 1048576 are free") as refused:
        memory.export(make)
    assert refused.value.metadata["tag"] == "export"


def test_more_ranks_than_a_cpu_has_memory_for_are_refused_before_the_start(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose, "host_memory", lambda: HostMemory(24 * 2**30, 20 * 2**30))
    config = config_of(model, budget_bytes=2**40)
    check_host_ranks(config)
    crowd = config.model_copy(update={"trainer": TrainerConfig(num_ranks=999)})
    with pytest.raises(
        InvalidArgument, match="trainer.num_ranks: makes 1000 processes .* at least 67.1 GB; this machine has 25.8"
    ):
        check_host_ranks(crowd)
    with pytest.raises(InvalidArgument, match=r"trainer\.num_ranks"):
        start_node(crowd)
    check_host_ranks(crowd.model_copy(update={"device": "cuda"}))
