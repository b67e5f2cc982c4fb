"""One node's part of a fleet's save: real tensors and a real log, on one rank in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tasuki.config.paths import training_save_path
from tasuki.config.schema import NodeConfig
from tasuki.rpc.failpoints import NO_FAILPOINTS
from tasuki.trainer.durable.restore import agree_on_log
from tasuki.trainer.durable.training_log import TrainingLog
from tasuki.trainer.learner import Learner
from tasuki.trainer.ranks.commands import RankCommands
from tasuki.trainer.ranks.front import TrainerRanks
from tasuki.trainer.service.saving import Saving
from tasuki.v1.ranks_pb2 import LogOutline, TrainerRankCommand, TrainerRankResult, TrainingRecord
from tasuki.v1.trainer_pb2 import SaveCheckpointRequest, SavePart
from tasuki.wire.errors import InvalidArgument, PathExists, VersionOrder
from tests.integration.learning import start_learner
from tests.models import make_model, save_checkpoint


class OneRank:
    """The front of a rank in this process."""

    def __init__(self, learner: Learner) -> None:
        self._commands = RankCommands(learner, failpoints=NO_FAILPOINTS)

    async def call(self, command: TrainerRankCommand) -> list[TrainerRankResult]:
        return [TrainerRankResult(save_checkpoint=self._commands.save_checkpoint(command.save_checkpoint))]


class DictStore:
    """A rank store for nodes that are threads or do not exist."""

    def __init__(self, **values: bytes) -> None:
        self.values = values
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 60)
            return self.values[key]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    folder = tmp_path_factory.mktemp("rank")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        model = save_checkpoint(make_model("llama", seed=3), folder / "model")
        made = start_learner(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
        yield made
        made.backend.close()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TrainingLog]:
    made = TrainingLog(tmp_path / "training.log", failpoints=NO_FAILPOINTS)
    yield made
    made.close()


def saving_of(learner: Learner, log: TrainingLog, folder: Path) -> Saving:
    return Saving(cast(TrainerRanks, OneRank(learner)), log, record_path=folder / "training.save")


def request(path: Path, part: SavePart.ValueType, save_id: str = "a") -> SaveCheckpointRequest:
    return SaveCheckpointRequest(path=str(path), part=part, save_id=save_id)


async def train(log: TrainingLog, name: str) -> None:
    record = TrainingRecord(request_id=name)
    record.optim_step.SetInParent()
    async with log.command(record):
        pass


async def test_a_save_has_its_name_once_it_is_published(tmp_path: Path, learner: Learner, log: TrainingLog) -> None:
    saving, path = saving_of(learner, log, tmp_path), tmp_path / "step-1"
    await train(log, "one")
    written = await saving.save(request(path, SavePart.SAVE_PART_WRITE), TrainingRecord(request_id="w"))
    assert written.bytes > 0 and not path.exists()
    assert len(list(log.records())) == 1
    await saving.save(request(path, SavePart.SAVE_PART_PUBLISH), TrainingRecord(request_id="p"))
    assert learner.check_checkpoint(path) == 0
    assert [(record.request_id, record.save_id) for record in log.records()] == [("p", "a")]
    with pytest.raises(PathExists):
        await saving.save(request(path, SavePart.SAVE_PART_WRITE, "b"), TrainingRecord(request_id="w2"))


async def test_what_is_no_longer_the_state_is_not_published(tmp_path: Path, learner: Learner, log: TrainingLog) -> None:
    saving, path = saving_of(learner, log, tmp_path), tmp_path / "step-1"
    await saving.save(request(path, SavePart.SAVE_PART_WRITE), TrainingRecord())
    await train(log, "one")
    with pytest.raises(VersionOrder):
        await saving.save(request(path, SavePart.SAVE_PART_PUBLISH), TrainingRecord())
    await saving.save(request(path, SavePart.SAVE_PART_DROP), TrainingRecord())
    assert [each.name for each in tmp_path.iterdir() if "step" in each.name] == []
    with pytest.raises(InvalidArgument, match="save_id"):
        await saving.save(request(path, SavePart.SAVE_PART_PUBLISH), TrainingRecord())


async def test_nodes_that_share_a_folder_write_it_once(tmp_path: Path, learner: Learner) -> None:
    """The second node comes while the first one writes, the third one afterwards."""
    logs = [TrainingLog(tmp_path / f"{name}.log", failpoints=NO_FAILPOINTS) for name in ("one", "two", "three")]
    one, two, three = (saving_of(learner, log, tmp_path) for log in logs)
    path, write = tmp_path / "step-1", request(tmp_path / "step-1", SavePart.SAVE_PART_WRITE)
    first = await one.save(write, TrainingRecord())
    written, partial = tmp_path / ".step-1.written-a", tmp_path / ".step-1.partial-a"
    written.rename(partial)
    second = await two.save(write, TrainingRecord())
    partial.rename(written)
    third = await three.save(write, TrainingRecord())
    assert first.bytes > 0 == second.bytes == third.bytes
    for saving in (one, two, three):
        await saving.save(request(path, SavePart.SAVE_PART_PUBLISH), TrainingRecord())
    for log in logs:
        log.close()
    assert learner.check_checkpoint(path) == 0


async def test_a_node_that_died_before_it_published_does_so_when_another_had(
    tmp_path: Path, learner: Learner, log: TrainingLog
) -> None:
    config = NodeConfig.model_validate(
        {
            "state_dir": tmp_path,
            "model": {"path": tmp_path},
            "fleet": {"name": "lab", "num_nodes": 2, "node_rank": 1, "leader": "localhost:50050"},
        }
    )
    path = tmp_path / "step-1"
    await train(log, "one")
    saving = Saving(cast(TrainerRanks, OneRank(learner)), log, record_path=training_save_path(config.state_dir))
    await saving.save(request(path, SavePart.SAVE_PART_WRITE), TrainingRecord(request_id="w"))
    theirs = LogOutline(commands=["checkpoint a"], save_id="a")
    await asyncio.wait_for(agree_on_log(log, DictStore(**{"log/0": theirs.SerializeToString()}), config=config), 20)
    assert path.is_dir()
    assert [record.WhichOneof("command") for record in log.records()] == ["checkpoint"]
