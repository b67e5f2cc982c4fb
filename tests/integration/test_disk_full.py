"""A full disk and the trainer's checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.trainer.backends.fsdp.checkpoint import training_tensors
from tasuki.trainer.durable.checkpoint import save_checkpoint
from tasuki.wire.errors import DiskFull
from tests.integration.one_rank import group
from tests.integration.test_checkpoint import FACTS, assert_loads, tensors_of, trained
from tests.tiny_disk import TinyDisk, limited_files, tmpfs

__all__ = ["group"]


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
