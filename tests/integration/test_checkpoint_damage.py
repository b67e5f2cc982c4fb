"""Checkpoints damaged after they were saved are refused by name and at once, and nothing changes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tasuki.trainer.backends.fsdp.checkpoint import CheckpointFacts, RoleFacts, load_checkpoint, save_checkpoint
from tasuki.trainer.durable.checkpoint_files import StoredTensor
from tasuki.trainer.roles import Role
from tasuki.wire.errors import InvalidArgument, PathPermissionDenied, TasukiError
from tests.integration.one_rank import group

__all__ = ["group"]

FACTS = CheckpointFacts(num_ranks=1, roles={Role.POLICY: RoleFacts(version=3, schedule_start=0, architecture="Linear")})
NOBODY = 65534


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    save_checkpoint(path, tensors={"policy.weight": torch.arange(4096.0), "policy.bias": torch.ones(4)}, facts=FACTS)
    return path


def loads(path: Path, *, progressed: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    tensors = {"policy.weight": torch.zeros(4096), "policy.bias": torch.zeros(4)}
    try:
        load_checkpoint(path, tensors=tensors, have=FACTS, progressed=progressed)
    except TasukiError:
        assert not any(tensor.any() for tensor in tensors.values())
        raise
    return tensors


@contextmanager
def ended_by_a_writer(fifo: Path) -> Iterator[None]:
    """Unblocks readers of the FIFO after some seconds, so that a failing test does not hang."""
    timer = threading.Timer(10, lambda: os.close(os.open(fifo, os.O_RDWR)))
    timer.start()
    try:
        yield
        assert timer.is_alive(), "somebody has waited for a writer"
    finally:
        timer.cancel()


def test_one_flipped_byte_of_a_tensor_is_refused(saved: Path) -> None:
    assert torch.equal(loads(saved)["policy.weight"], torch.arange(4096.0))
    file = saved / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(torch.arange(1000.0, 1010.0).numpy().tobytes()) + 5] ^= 0x01
    file.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"cannot be restored: __0_0\.distcp is damaged: its checksum"):
        loads(saved)


def test_a_file_that_was_cut_off_is_refused(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidArgument, match="is damaged: its checksum"):
        loads(saved)


@pytest.mark.parametrize("name", ["checkpoint.json", "tensors.json", "__0_0.distcp"])
def test_a_fifo_in_the_place_of_a_file_is_refused_at_once(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with ended_by_a_writer(saved / name), pytest.raises(InvalidArgument, match="is not a regular file"):
        loads(saved)


@pytest.mark.parametrize("name", ["checkpoint.json", "tensors.json", "__0_0.distcp"])
def test_a_file_that_may_not_be_read_is_refused_by_name(saved: Path, name: str) -> None:
    with TemporaryDirectory() as place:  # tmp_path is below a folder of the user alone
        Path(place).chmod(0o755)
        copied = shutil.copytree(saved, Path(place) / "saved")
        copied.chmod(0o755)
        for file in copied.iterdir():
            file.chmod(0 if file.name == name else 0o644)
        try:
            if os.geteuid() == 0:
                os.seteuid(NOBODY)
            with pytest.raises(PathPermissionDenied, match=rf"{copied / name}: permission denied for user "):
                loads(copied)
        finally:
            os.seteuid(os.getuid())


@pytest.mark.parametrize("name", ["checkpoint.json", "tensors.json"])
def test_no_flipped_bit_of_an_index_is_loaded(saved: Path, name: str) -> None:
    good = (saved / name).read_bytes()
    for place in range(len(good)):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        (saved / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"is damaged: |has a format that"):
            loads(saved)
    (saved / name).write_bytes(good)
    loads(saved)


@pytest.mark.parametrize(
    ("parts", "is_whole"),
    [
        ([([0, 0], [4, 6])], True),
        ([([0, 0], [2, 6]), ([2, 0], [2, 6]), ([4, 0], [0, 6])], True),
        # Four blocks around one in the middle.
        ([([0, 0], [1, 4]), ([0, 4], [3, 2]), ([3, 2], [1, 4]), ([1, 0], [3, 2]), ([1, 2], [2, 2])], True),
        ([([0, 0], [2, 6]), ([0, 0], [2, 6])], False),
        ([([0, 0], [3, 6]), ([2, 0], [1, 6])], False),
        ([([0, 0], [2, 6]), ([4, 0], [2, 6])], False),
        ([([0, 0], [4, 3]), ([0, 3], [4, 2])], False),
        ([([0, 0], [4, 6]), ([0, 0], [4, 6])], False),
    ],
)
def test_parts_are_a_tiling(parts: list[tuple[list[int], list[int]]], is_whole: bool) -> None:
    place = {"file": "__0_0.distcp", "start": 0, "num_bytes": 0, "crc32": 0}
    tensor = {
        "dtype": "float32",
        "size": [4, 6],
        "parts": [{"offsets": offsets, "sizes": sizes, **place} for offsets, sizes in parts],
    }
    with nullcontext() if is_whole else pytest.raises(ValidationError, match="its parts are not the whole tensor"):
        StoredTensor.model_validate(tensor)
