"""Full and read-only disks: the coordinator's journal, and the trainer's checkpoints."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.config.save import save_config
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.trainer.backends.fsdp.checkpoint import save_checkpoint, training_tensors
from tasuki.v1.types_pb2 import PHASE_ROLLOUT
from tasuki.wire.errors import DiskFull
from tests.integration.coordinator_process import DEADLINE_S, Node, coordinated
from tests.integration.one_rank import group
from tests.integration.stage_services import serving
from tests.integration.test_checkpoint import FACTS, assert_loads, tensors_of, trained
from tests.tiny_disk import TinyDisk, limited_files, tmpfs

__all__ = ["group"]


async def test_coordinator_ends_on_a_full_disk_and_starts_again_when_there_is_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", num_kib=1024) as disk:
        config = NodeConfig(state_dir=disk.folder / "state", model=ModelConfig(path=tmp_path))
        config.state_dir.mkdir()
        save_config(config, config.state_dir / "node.toml")
        async with serving(config) as services, coordinated(config, *services) as node:
            await node.settled()
            await node.acquire(PHASE_ROLLOUT)
            disk.fill()
            await killed(node)
            node.process = await node.start()
            assert await asyncio.wait_for(node.process.wait(), DEADLINE_S) == 2
            disk.free()
            node.process = await node.start()
            assert (await node.settled()).phase == PHASE_ROLLOUT
            await node.stop()


async def killed(node: Node) -> None:
    node.process.kill()
    await node.process.wait()


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TinyDisk]:
    folder = tmp_path / "disk"
    with tmpfs(folder, num_kib=2048) if request.param == "tmpfs" else limited_files(folder) as disk:
        yield disk


def test_checkpoint_without_room_leaves_the_one_before_and_nothing_else(disk: TinyDisk) -> None:
    model, optimizer = trained(seed=0, width=8192)
    expected = tensors_of(model, optimizer)
    first, second = disk.folder / "first", disk.folder / "second"
    save_checkpoint(first, tensors=training_tensors(model, optimizer), facts=FACTS)
    disk.fill()
    with pytest.raises(DiskFull, match=r"second cannot be written: .*; existing files are unchanged\. Free space") as full:
        save_checkpoint(second, tensors=training_tensors(model, optimizer), facts=FACTS)
    assert full.value.metadata["path"] == str(second)
    assert {file.name for file in disk.folder.iterdir()} - {"filler"} == {"first"}
    assert_loads(first, expected, width=8192)
    disk.free()
    save_checkpoint(second, tensors=training_tensors(model, optimizer), facts=FACTS)
    assert_loads(second, expected, width=8192)
