"""A checkpoint's files: saved state is restored, and nothing in the folder is trusted or executed."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasuki.trainer.backends.fsdp.checkpoint import (
    CheckpointFacts,
    RoleFacts,
    check_checkpoint,
    load_checkpoint,
    save_checkpoint,
    training_tensors,
)
from tasuki.trainer.roles import Role
from tasuki.wire.errors import InvalidArgument
from tests.integration.one_rank import group
from tests.resealed import reseal

__all__ = ["group"]

FACTS = CheckpointFacts(num_ranks=1, roles={Role.POLICY: RoleFacts(version=3, schedule_start=2, architecture="Linear")})


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def trained(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
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


def assert_loads(path: Path, expected: list[torch.Tensor]) -> None:
    model, optimizer = trained(seed=99)
    assert load_checkpoint(path, tensors=training_tensors(model, optimizer), have=FACTS) == FACTS
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(model, optimizer), expected, strict=True))


def assert_refused(path: Path, problem: str) -> None:
    """Checks that the checkpoint is refused and that nothing has changed."""
    model, optimizer = trained(seed=99)
    before = tensors_of(model, optimizer)
    with pytest.raises(InvalidArgument, match=problem) as refused:
        load_checkpoint(path, tensors=training_tensors(model, optimizer), have=FACTS)
    assert refused.value.metadata["field"] == "path"
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(model, optimizer), before, strict=True))


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
        with pytest.raises(InvalidArgument, match=problem) as refused:
            load(tmp_path / "saved", tensors=states[1], have=FACTS)
        assert refused.value.metadata["field"] == "path"
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
        ({"size": [16, 8]}, "damaged: model.weight: .*its parts are not the whole tensor"),
        ({"offsets": [1, 0]}, "damaged: model.weight: .*its parts are not the whole tensor"),
        ({"offsets": [2**62, 0]}, "damaged: model.weight: .*its parts are not the whole tensor"),
        ({"offsets": [2**70, 0]}, "damaged: model.weight.parts.0.offsets.0: "),
        ({"offsets": [0]}, "damaged: model.weight: .*its parts have other dimensions"),
        ({"parts": []}, "damaged: model.weight: .*its parts are not the whole tensor"),
        ({"file": "../other.distcp"}, "damaged: model.weight.parts.0.file: "),
        ({"file": "/dev/zero"}, "damaged: model.weight.parts.0.file: "),
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
