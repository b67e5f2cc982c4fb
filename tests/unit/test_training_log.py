"""Recovery of the trainer's log after a crash, damage or a full disk: every acknowledged command once, or a clear error."""

import asyncio
import struct
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message

from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.rpc.commands import CommandGate, digest
from tasuki.rpc.failpoints import NO_FAILPOINTS, Action, Failpoints, plant
from tasuki.rpc.process_start import read_replay
from tasuki.trainer.durable.restore import recipe, restore
from tasuki.trainer.durable.training_log import TrainingLog, read_training_log
from tasuki.trainer.service.state import TrainerState
from tasuki.trainer.wire import Role
from tasuki.v1 import trainer_pb2
from tasuki.v1.ranks_pb2 import LoggedForwardBackward, TrainingRecord
from tasuki.v1.types_pb2 import ROLE_POLICY, CommandId, TrainingSample
from tasuki.wire.errors import DiskFull, GradientsNotFinite, InvalidArgument, PathNotFound, TasukiError

HEADER = struct.Struct("<IIB")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "training.log"


def opened(path: Path) -> TrainingLog:
    return TrainingLog(path, failpoints=NO_FAILPOINTS)


def learn(request_id: str) -> TrainingRecord:
    sample = TrainingSample(prompt_token_ids=[1, 2], completion_token_ids=list(request_id.encode()))
    return TrainingRecord(request_id=request_id, forward_backward=LoggedForwardBackward(samples=[sample]))


def step(request_id: str) -> TrainingRecord:
    return TrainingRecord(request_id=request_id, optim_step=trainer_pb2.OptimStepRequest(learning_rate=0.5))


async def write(log: TrainingLog, *records: TrainingRecord) -> None:
    for record in records:
        async with log.command(record):
            pass


def ids(path: Path) -> list[str]:
    log = opened(path)
    found = [record.request_id for record in log.records()]
    log.close()
    return found


async def three(path: Path) -> bytes:
    """Writes a log of three records; returns its bytes."""
    log = opened(path)
    await write(log, learn("a"), learn("b"), step("c"))
    log.close()
    return path.read_bytes()


def ends(content: bytes) -> list[int]:
    """Returns the end of each frame."""
    found, at = [], 0
    while at < len(content):
        at += HEADER.size + HEADER.unpack_from(content, at)[0]
        found.append(at)
    return found


async def test_a_log_cut_off_anywhere_gives_back_every_whole_record(path: Path) -> None:
    whole = await three(path)
    frame_ends = ends(whole)
    for length in range(len(whole)):
        num_whole = sum(end <= length for end in frame_ends)
        torn = bytearray(whole[:length])
        start = ([0, *frame_ends])[num_whole]
        if length >= start + HEADER.size:
            torn[start + HEADER.size - 1] = 0  # only complete frames are marked as done
        path.write_bytes(torn)
        assert ids(path) == ["a", "b", "c"][:num_whole]
        assert path.stat().st_size == start, "what is torn is cut off"


async def test_a_log_is_known_by_what_was_trained(path: Path) -> None:
    log, digests = opened(path), list[str]()
    for record in (learn("a"), learn("b"), step("c")):
        digests.append(log.digest())
        await write(log, record)
    log.close()
    again = opened(path)
    assert len({*digests, again.digest()}) == 4
    again.keep(2)
    assert again.digest() == digests[2]
    await write(again, step("d"))
    assert again.digest() != digests[2]
    again.close()


async def test_a_tail_of_zeros_as_after_a_loss_of_power_is_dropped(path: Path) -> None:
    whole = await three(path)
    path.write_bytes(whole + bytes(500))
    assert [record.request_id for record in read_training_log(path)] == ids(path) == ["a", "b", "c"]
    assert path.read_bytes() == whole


async def test_any_damaged_byte_of_what_was_done_is_told_and_nothing_is_changed(path: Path) -> None:
    whole = await three(path)
    first, second, _ = ends(whole)
    for at in range(second):
        damaged = whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(InvalidArgument, match=f"damaged at byte {0 if at < first else first}; restart the node and"):
            opened(path)
        with pytest.raises(InvalidArgument, match=r"damaged at byte \d+$"):  # a reader has no node to start
            read_training_log(path)
        assert path.read_bytes() == damaged


async def test_failed_commands_are_not_in_the_log_and_skipped_steps_are(path: Path) -> None:
    log = opened(path)
    with pytest.raises(ZeroDivisionError):
        async with log.command(learn("a")):
            raise ZeroDivisionError
    await write(log, learn("b"))
    with pytest.raises(GradientsNotFinite):
        async with log.command(step("c")):
            raise GradientsNotFinite("nan")
    log.close()
    assert ids(path) == ["b", "c"]


class CountingTraining:
    """Ranks without a model: the commands they carried out, and a version that counts the steps. They have no checkpoint."""

    def __init__(self) -> None:
        self.state = TrainerState({Role.POLICY: trainer_pb2.RoleState(role=ROLE_POLICY)}, gate=CommandGate())
        self.done: list[str] = []

    async def load_checkpoint(self, request: trainer_pb2.LoadCheckpointRequest) -> Message:
        raise PathNotFound(f"{request.path} is not a checkpoint: it has nothing", path=request.path)

    async def begin_run(self, request: trainer_pb2.BeginRunRequest) -> Message:
        self.done.append("run")
        self.state.roles[Role.POLICY].schedule_start = self.state.policy_version
        return trainer_pb2.BeginRunResponse(policy_version=self.state.policy_version)

    async def optim_step(self, request: trainer_pb2.OptimStepRequest) -> Message:
        self.done.append("step")
        if request.learning_rate > 1:
            raise GradientsNotFinite("nan")
        self.state.roles[Role.POLICY].version += 1
        return trainer_pb2.OptimStepResponse(version=self.state.policy_version)


@asynccontextmanager
async def trainer(path: Path, config: NodeConfig):
    """One life of a trainer: it restores its log and carries out commands."""
    training, log = CountingTraining(), opened(path)
    await restore(training, log, config=config)

    async def ask(request_id: str, *, learning_rate: float = 0.5) -> Message:
        request = trainer_pb2.OptimStepRequest(command=CommandId(request_id=request_id), learning_rate=learning_rate)
        record = TrainingRecord(request_id=request_id, digest=digest(request), recipe=recipe(config), optim_step=request)

        async def act() -> Message:
            async with training.state.training(), log.command(record):
                return await training.optim_step(request)

        return await training.state.gate.once(request, act)

    yield training, ask
    log.close()


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path))


async def test_a_trainer_restarted_gives_the_same_answers_and_carries_nothing_out_again(path: Path, config: NodeConfig) -> None:
    async with trainer(path, config) as (_, ask):
        answers = [await ask("a"), await ask("b")]
        with pytest.raises(GradientsNotFinite):
            await ask("bad", learning_rate=2.0)
        answers.append(await ask("c"))
    for _ in range(2):
        async with trainer(path, config) as (again, ask):
            assert again.done == ["step"] * 4
            assert again.state.policy_version == 3
            assert [await ask(name) for name in ("a", "b", "c")] == answers
            with pytest.raises(GradientsNotFinite):
                await ask("bad", learning_rate=2.0)
            assert len(again.done) == 4
            with pytest.raises(InvalidArgument, match="was used for another request"):
                await ask("a", learning_rate=0.1)


async def test_a_replay_says_how_far_it_is(path: Path, config: NodeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trainer(path, config) as (_, ask):
        await ask("a")
        await ask("b")
    told, optim_step = list[str](), CountingTraining.optim_step

    async def step_and_look(self: CountingTraining, request: trainer_pb2.OptimStepRequest) -> Message:
        told.append(read_replay(config.state_dir))
        return await optim_step(self, request)

    monkeypatch.setattr(CountingTraining, "optim_step", step_and_look)
    async with trainer(path, config):
        assert told == ["replaying command 1 of 2", "replaying command 2 of 2"]
        assert read_replay(config.state_dir) == ""


async def test_a_command_cut_off_between_begin_and_commit_is_carried_out_once_when_it_is_asked_again(
    path: Path, config: NodeConfig
) -> None:
    async with trainer(path, config) as (first, ask):
        await ask("a")
        never = asyncio.Event()
        first.optim_step = lambda request: never.wait()
        cut_off = asyncio.create_task(ask("b"))
        while path.stat().st_size == ends(path.read_bytes())[0]:
            await asyncio.sleep(0)
        killed = path.read_bytes()
        cut_off.cancel()
    path.write_bytes(killed)  # state after SIGKILL
    async with trainer(path, config) as (second, ask):
        assert second.state.policy_version == 1
        assert (await ask("b")).version == 2
        assert (await ask("b")).version == 2
        assert second.done == ["step", "step"]
    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize("kind", [PathNotFound, InvalidArgument])
async def test_a_log_whose_checkpoint_is_gone_or_another_says_what_to_do(
    path: Path, config: NodeConfig, tmp_path: Path, kind: type[TasukiError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load_checkpoint(*_: object) -> Message:
        raise PathNotFound("it is gone", path="p") if kind is PathNotFound else InvalidArgument("path", "it is another")

    training = CountingTraining()
    monkeypatch.setattr(training, "load_checkpoint", load_checkpoint)
    log = opened(path)
    loaded = trainer_pb2.LoadCheckpointRequest(path=str(tmp_path / "version-000002"))
    await log.loaded(TrainingRecord(recipe=recipe(config), checkpoint=loaded))
    with pytest.raises(kind, match=r"it is (gone|another); training\.log builds on it: restore it, or `tasuki up`"):
        await restore(training, log, config=config)
    log.close()


async def test_a_log_of_other_settings_is_refused(path: Path, config: NodeConfig, tmp_path: Path) -> None:
    async with trainer(path, config) as (_, ask):
        await ask("a")
    other = config.model_copy(update={"model": ModelConfig(path=tmp_path / "other")})
    log = opened(path)
    with pytest.raises(TasukiError, match="another model or other"):
        await restore(CountingTraining(), log, config=other)
    log.close()


async def test_full_disk_refuses_a_command_before_it_is_carried_out(path: Path, tmp_path: Path) -> None:
    log = TrainingLog(path, failpoints=Failpoints("trainer", folder=tmp_path))
    await write(log, learn("a"))
    plant(tmp_path, "trainer", "log.begin", Action.FULL)
    with pytest.raises(DiskFull, match="No space left on device; nothing was trained"):
        async with log.command(learn("b")):
            pytest.fail("the block is entered")
    await write(log, learn("c"))
    log.close()
    assert ids(path) == ["a", "c"]


async def test_a_mark_that_cannot_be_written_stops_training_until_the_trainer_is_restarted(path: Path, tmp_path: Path) -> None:
    log = TrainingLog(path, failpoints=Failpoints("trainer", folder=tmp_path))
    await write(log, learn("a"))
    plant(tmp_path, "trainer", "log.commit", Action.FULL)
    with pytest.raises(DiskFull, match="the trainer is ahead of it"):
        await write(log, step("b"))
    with pytest.raises(DiskFull, match="lacks a completed command"):
        await write(log, learn("c"))
    with pytest.raises(DiskFull, match="lacks a completed command"):
        log.check_not_behind()  # as before saving a checkpoint
    log.close()
    assert ids(path) == ["a"]


async def test_full_disk_at_a_saved_checkpoint_leaves_the_log_as_it_was_and_warns(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = TrainingLog(path, failpoints=Failpoints("trainer", folder=tmp_path))
    await write(log, learn("a"), step("b"))
    plant(tmp_path, "trainer", "log.replace", Action.FULL)
    checkpoint = TrainingRecord(checkpoint=trainer_pb2.LoadCheckpointRequest(path="/c"))
    await log.saved(checkpoint)
    aside = path.with_suffix(".part")
    assert not aside.exists()
    assert [record.request_id for record in read_training_log(path)] == ["a", "b"]
    aside.mkdir()  # no file can be opened there, as on a read-only disk
    await log.saved(checkpoint)
    aside.rmdir()
    assert caplog.text.count("event=log_not_shortened checkpoint='/c'") == 2
    assert [record.request_id for record in read_training_log(path)] == ["a", "b"]
    await write(log, learn("c"))
    await log.saved(checkpoint)
    log.close()
    assert ids(path) == ["", "c"]
