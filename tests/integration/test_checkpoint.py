"""A checkpoint's files: saved state is restored, and nothing in the folder is trusted or executed."""

import json
import os
import pickle
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tasuki.trainer.backends.fsdp.checkpoint import training_tensors
from tasuki.trainer.durable.checkpoint import CheckpointFacts, RoleFacts, check_checkpoint, load_checkpoint, save_checkpoint
from tasuki.trainer.durable.checkpoint_files import StoredTensor
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument, PathPermissionDenied
from tasuki.wire.sealed_json import sealed
from tests.integration.one_rank import group
from tests.refusal import refusing
from tests.sockets import NOBODY

__all__ = ["group"]

FACTS = CheckpointFacts(num_ranks=1, roles={Role.POLICY: RoleFacts(version=3, schedule_start=2, architecture="Linear")})


def reseal(checkpoint: Path, fields: Mapping[str, Any] | None = None) -> None:
    """Recomputes the checksums of a changed checkpoint. fields: new values in checkpoint.json; None keeps its own."""
    file = checkpoint / "checkpoint.json"
    kept = dict(json.loads(file.read_text()) if fields is None else fields)
    kept.pop("crc32", None)
    kept["tensors_crc32"] = zlib.crc32((checkpoint / "tensors.json").read_bytes())
    file.write_text(sealed(kept))


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def trained(seed: int, *, width: int = 16) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(width, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    """Saves a checkpoint; returns its path and its contents."""
    model, optimizer = trained(seed=0)
    save_checkpoint(tmp_path / "saved", tensors=training_tensors(model, optimizer), facts=FACTS)
    return tmp_path / "saved", tensors_of(model, optimizer)


def assert_loads(path: Path, expected: list[torch.Tensor], *, width: int = 16) -> None:
    model, optimizer = trained(seed=99, width=width)
    assert load_checkpoint(path, tensors=training_tensors(model, optimizer), have=FACTS) == FACTS
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(model, optimizer), expected, strict=True))


def assert_refused(path: Path, problem: str) -> None:
    """Checks that the checkpoint is refused and that nothing has changed."""
    model, optimizer = trained(seed=99)
    before = tensors_of(model, optimizer)
    with refusing("path", match=problem):
        load_checkpoint(path, tensors=training_tensors(model, optimizer), have=FACTS)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(model, optimizer), before, strict=True))


def test_files_of_a_checkpoint_are_for_their_user_alone(saved: tuple[Path, list[torch.Tensor]]) -> None:
    files = [path for path in saved[0].rglob("*") if path.is_file()]
    assert len(files) > 2 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_checkpoint_brings_back_all_tensors_and_the_random_state(saved: tuple[Path, list[torch.Tensor]]) -> None:
    path, expected = saved
    torch.manual_seed(0)
    trained(seed=0)
    following = torch.rand(3)
    assert_loads(path, expected)
    assert torch.equal(torch.rand(3), following)
    assert {file.name for file in path.iterdir()} == {"__0_0.distcp", "checkpoint.json", "tensors.json"}


@pytest.mark.parametrize(
    ("held", "have", "problem"),
    [
        ((8, 8, 8), (8, 8), r"model\.2\.bias and 7 more that the trainer lacks; load it with the model and"),
        ((8, 8), (8, 8, 8), r"model\.2\.bias and 7 more not in it; load"),
        ((8, 8), (8, 4), r"holds model\.1\.weight of \[8, 8\], but the trainer's has \[4, 8\]; load"),
    ],
)
def test_a_checkpoint_of_other_tensors_is_refused_before_any_is_read(
    tmp_path: Path, held: tuple[int, ...], have: tuple[int, ...], problem: str
) -> None:
    states = []
    for widths in (held, have):
        model = nn.Sequential(*[nn.Linear(8, width) for width in widths])
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states.append(training_tensors(model, optimizer))
    save_checkpoint(tmp_path / "saved", tensors=states[0], facts=FACTS)
    before = {name: tensor.clone() for name, tensor in states[1].items()}
    for load in (check_checkpoint, load_checkpoint):
        with refusing("path", match=problem):
            load(tmp_path / "saved", tensors=states[1], have=FACTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in states[1].items())


def test_a_pickle_in_the_place_of_torchs_index_is_not_run(saved: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> None:
    path, expected = saved
    content = pickle.dumps(Malicious(tmp_path / "ran"))
    pickle.loads(content)
    (tmp_path / "ran").rmdir()  # the payload really works
    for name in (".metadata", "__0.metadata"):
        (path / name).write_bytes(content)
    assert_loads(path, expected)
    (path / "tensors.json").unlink()
    assert_refused(path, r"tensors\.json cannot be read: No such file")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_in_the_place_of_the_tensors_is_not_run(saved: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> None:
    path, _ = saved
    torch.save(Malicious(tmp_path / "ran"), path / "__0_0.distcp")
    content = (path / "__0_0.distcp").read_bytes()
    index: dict[str, Any] = json.loads((path / "tensors.json").read_text())
    for tensor in index.values():
        tensor["parts"][0] |= {"start": 0, "num_bytes": len(content), "crc32": zlib.crc32(content)}
    (path / "tensors.json").write_text(json.dumps(index))
    reseal(path)
    assert_refused(path, "cannot be restored: UnpicklingError")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dtype": "load"}, "damaged: model.weight.dtype: .*load is not a dtype"),
        ({"size": [8, -1]}, "damaged: model.weight.size.1: "),
        ({"offsets": [2**62, 0]}, "damaged: model.weight: .*its parts are not the whole tensor"),
        ({"offsets": [0]}, "damaged: model.weight: .*its parts have other dimensions"),
        ({"file": "../other.distcp"}, "damaged: model.weight.parts.0.file: "),
        ({"file": "__1_0.distcp"}, "cannot be restored: FileNotFoundError"),
        ({"start": 1}, "cannot be restored"),
    ],
)
def test_an_index_that_is_not_what_was_written_is_refused(
    saved: tuple[Path, list[torch.Tensor]], change: dict[str, Any], problem: str
) -> None:
    path, _ = saved
    index = json.loads((path / "tensors.json").read_text())
    weight = index["model.weight"]
    place = weight if change.keys() <= weight.keys() else weight["parts"][0]
    place.update(change)
    (path / "tensors.json").write_text(json.dumps(index))
    assert_refused(path, r"tensors\.json is damaged: its checksum differs from the one in checkpoint\.json")
    reseal(path)
    assert_refused(path, problem)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 3}, "has a format that this version cannot read"),
        ({"num_ranks": -1}, "damaged: num_ranks: "),
        ({"version": "3"}, "damaged: roles.policy.version: "),
        ({"schedule_start": 4}, "damaged: roles.policy.schedule_start: is 4, above the version 3$"),
        ({"roles": {"owner": {}}}, "damaged: roles.owner"),
    ],
)
def test_facts_that_are_not_what_was_written_are_refused(
    saved: tuple[Path, list[torch.Tensor]], change: dict[str, Any], problem: str
) -> None:
    path, _ = saved
    facts = json.loads((path / "checkpoint.json").read_text())
    (facts if change.keys() <= facts.keys() else facts["roles"]["policy"]).update(change)
    reseal(path, facts)
    assert_refused(path, problem)


FILES = ("checkpoint.json", "tensors.json", "__0_0.distcp")


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_damaged_tensors_are_refused(saved: tuple[Path, list[torch.Tensor]], is_cut_off: bool) -> None:
    file = saved[0] / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(file.read_bytes()[:-100] if is_cut_off else content)
    assert_refused(saved[0], r"cannot be restored: __0_0\.distcp is damaged: its checksum")


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


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_in_the_place_of_a_file_is_refused_at_once(saved: tuple[Path, list[torch.Tensor]], name: str) -> None:
    (saved[0] / name).unlink()
    os.mkfifo(saved[0] / name)
    with ended_by_a_writer(saved[0] / name):
        assert_refused(saved[0], "is not a regular file")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_refused_by_name(saved: tuple[Path, list[torch.Tensor]], name: str) -> None:
    with TemporaryDirectory() as place:  # tmp_path is below a folder of the user alone
        Path(place).chmod(0o755)
        copied = shutil.copytree(saved[0], Path(place) / "saved")
        copied.chmod(0o755)
        for file in copied.iterdir():
            file.chmod(0 if file.name == name else 0o644)
        try:
            if os.geteuid() == 0:
                os.seteuid(NOBODY)
            with pytest.raises(PathPermissionDenied, match=rf"{copied / name}: permission denied for user "):
                load_checkpoint(copied, tensors=training_tensors(*trained(seed=99)), have=FACTS)
        finally:
            os.seteuid(os.getuid())


@pytest.mark.parametrize("name", FILES[:2])
def test_no_flipped_bit_of_an_index_is_loaded(saved: tuple[Path, list[torch.Tensor]], name: str) -> None:
    path, expected = saved
    good, tensors = (path / name).read_bytes(), training_tensors(*trained(seed=99))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for place in range(len(good)):
        content = bytearray(good)
        content[place] ^= 1 << place % 8
        (path / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"is damaged: |has a format that"):
            load_checkpoint(path, tensors=tensors, have=FACTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    (path / name).write_bytes(good)
    assert_loads(path, expected)


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
