"""A whole node as its user has it: real services on a tiny model, the command line, and changeovers both ways."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from tasuki.config.load import load_config
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import config_path, node_targets
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import memory_pb2, rollout_pb2, trainer_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.v1.rollout_pb2_grpc import RolloutServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.v1.types_pb2 import (
    MEMORY_TAG_EXPORT,
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    PHASE_ROLLOUT,
    PHASE_TRAIN,
    STAGE_DRAIN,
    STAGE_LOAD_WEIGHTS,
    STAGE_OFFLOAD,
    STAGE_PAUSE_KV,
    STAGE_RESUME_KV,
    STAGE_SYNC,
    CommandId,
)
from tasuki.wire.errors import TasukiError, from_rpc_error
from tests.conftest import ENVIRONMENT, RunningNode, called, tasuki

LIMIT_S = 60.0


@pytest.fixture
def channels(node: RunningNode) -> Iterator[dict[str, grpc.Channel]]:
    targets = node_targets(load_config(config_path(node.state_dir)))
    channels = {name: grpc.insecure_channel(target) for name, target in targets.items()}
    yield channels
    for channel in channels.values():
        channel.close()


@pytest.fixture
def coordinator(channels: dict[str, grpc.Channel]) -> CoordinatorServiceStub:
    return CoordinatorServiceStub(channels["coordinator"])


def acquire(coordinator: CoordinatorServiceStub, phase: int) -> pb.NodeState:
    responses = list(coordinator.Acquire(pb.AcquireRequest(phase=phase), timeout=LIMIT_S))
    return responses[-1].state


def refusal(call: Callable[..., object], *arguments: object) -> TasukiError:
    with pytest.raises(grpc.RpcError) as refused:
        call(*arguments, timeout=LIMIT_S)
    return from_rpc_error(refused.value)


def test_phases_go_round_and_the_journal_has_every_stage(coordinator: CoordinatorServiceStub) -> None:
    acquire(coordinator, PHASE_TRAIN)
    before = coordinator.GetState(pb.GetStateRequest(), timeout=LIMIT_S).state.num_changeovers
    for phase in (PHASE_ROLLOUT, PHASE_TRAIN) * 5:
        assert acquire(coordinator, phase).phase == phase
    listed = coordinator.ListChangeovers(pb.ListChangeoversRequest(page_size=10), timeout=LIMIT_S).changeovers
    assert [len(changeover.stages) for changeover in listed] == [4, 5] * 5
    assert {event.status for changeover in listed for event in changeover.stages} == {pb.STAGE_STATUS_DONE}
    synced = [event.bytes for changeover in listed for event in changeover.stages if event.stage == STAGE_SYNC]
    assert min(synced) > 0
    assert coordinator.GetState(pb.GetStateRequest(), timeout=LIMIT_S).state.num_changeovers == before + 10


def test_what_was_published_has_left_when_rollout_serves(
    coordinator: CoordinatorServiceStub, channels: dict[str, grpc.Channel]
) -> None:
    for _ in range(2):
        acquire(coordinator, PHASE_TRAIN)
        acquire(coordinator, PHASE_ROLLOUT)
        usage = MemoryServiceStub(channels["trainer"]).GetUsage(memory_pb2.GetUsageRequest(), timeout=LIMIT_S)
        copies = [tag for tag in usage.tags if tag.tag == MEMORY_TAG_EXPORT]
        assert [(tag.rank, tag.is_paused, tag.mapped_bytes) for tag in copies] == [(0, True, 0), (1, True, 0)]
        assert all(tag.total_bytes > 0 for tag in copies)


def test_stage_out_of_order_is_refused_by_coordinator_trainer_and_rollout_and_everything_goes_on(
    coordinator: CoordinatorServiceStub, channels: dict[str, grpc.Channel]
) -> None:
    epoch = acquire(coordinator, PHASE_ROLLOUT).epoch
    assert refusal(coordinator.RunStage, pb.RunStageRequest(stage=STAGE_SYNC)).reason == "STAGE_ORDER"

    def command(name: str) -> CommandId:
        return CommandId(epoch=epoch + 1000, sequence=1_000_000, request_id=f"out of order {name} {time.time()}")

    # A service takes whoever shows an epoch for a coordinator, until the next one does.
    trainer_state = trainer_pb2.GetTrainerStateRequest(epoch=epoch + 1000)
    TrainerServiceStub(channels["trainer"]).GetTrainerState(trainer_state, timeout=LIMIT_S)
    rollout_state = rollout_pb2.GetRolloutStateRequest(epoch=epoch + 1000)
    RolloutServiceStub(channels["rollout"]).GetRolloutState(rollout_state, timeout=LIMIT_S)
    offload = memory_pb2.PauseRequest(command=command("t"), stage=STAGE_OFFLOAD, tags=[MEMORY_TAG_WEIGHTS])
    assert refusal(MemoryServiceStub(channels["trainer"]).Pause, offload).reason == "STAGE_ORDER"
    resume = memory_pb2.ResumeRequest(command=command("r"), stage=STAGE_RESUME_KV, tags=[MEMORY_TAG_KV_CACHE])
    assert refusal(MemoryServiceStub(channels["rollout"]).Resume, resume).reason == "STAGE_ORDER"
    for phase in (PHASE_TRAIN, PHASE_ROLLOUT):
        assert acquire(coordinator, phase).phase == phase


def test_command_of_an_older_epoch_is_refused(coordinator: CoordinatorServiceStub, channels: dict[str, grpc.Channel]) -> None:
    acquire(coordinator, PHASE_ROLLOUT)
    stale = trainer_pb2.PublishWeightsRequest(command=CommandId(epoch=0, sequence=1, request_id="stale"))
    assert refusal(TrainerServiceStub(channels["trainer"]).PublishWeights, stale).reason == "STALE_EPOCH"


def test_single_stages_turn_back_from_the_middle(coordinator: CoordinatorServiceStub) -> None:
    acquire(coordinator, PHASE_ROLLOUT)
    for stage in (STAGE_DRAIN, STAGE_PAUSE_KV):
        coordinator.RunStage(pb.RunStageRequest(stage=stage), timeout=LIMIT_S)
    assert acquire(coordinator, PHASE_ROLLOUT).phase == PHASE_ROLLOUT
    acquire(coordinator, PHASE_TRAIN)
    for stage in range(STAGE_LOAD_WEIGHTS, STAGE_RESUME_KV):
        coordinator.RunStage(pb.RunStageRequest(stage=stage), timeout=LIMIT_S)
    assert acquire(coordinator, PHASE_TRAIN).phase == PHASE_TRAIN
    assert acquire(coordinator, PHASE_ROLLOUT).phase == PHASE_ROLLOUT


def test_state_shows_the_node_as_text_and_as_json(node: RunningNode, coordinator: CoordinatorServiceStub) -> None:
    acquire(coordinator, PHASE_TRAIN)
    text = called("state", node.config)
    assert text.returncode == 0, text.stderr
    assert "LOAD_TRAINER, next LOAD_WEIGHTS" in text.stdout
    told = json.loads(called("state", "--state-dir", node.state_dir, "--json").stdout)
    assert (told["node"]["phase"], told["trainer"]["num_ranks"], told["rollout"]["tp_size"]) == ("PHASE_TRAIN", 2, 1)
    assert {tag["tag"] for tag in told["rollout"]["memory"]["tags"]} >= {"MEMORY_TAG_WEIGHTS", "MEMORY_TAG_KV_CACHE"}


def test_watch_writes_a_line_for_each_event(node: RunningNode, coordinator: CoordinatorServiceStub) -> None:
    acquire(coordinator, PHASE_TRAIN)
    argv = [sys.executable, "-m", "tasuki.cli", "watch", str(node.config)]
    with subprocess.Popen(argv, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            assert watching.stdout.readline().startswith("TRAIN, epoch")
            acquire(coordinator, PHASE_ROLLOUT)
            lines = [watching.stdout.readline().split() for _ in range(11)]
        finally:
            watching.send_signal(signal.SIGINT)
    assert [line[2] for line in lines if line[3] == "DONE"] == [
        "LOAD_WEIGHTS",
        "RESUME_WEIGHTS",
        "SYNC",
        "OFFLOAD",
        "RESUME_KV",
        "changeover",
    ]


def test_second_up_is_refused_and_the_first_goes_on(node: RunningNode, coordinator: CoordinatorServiceStub) -> None:
    second = tasuki("up", node.config, timeout_s=LIMIT_S)
    assert second.returncode == 2
    assert second.stderr.startswith(
        f"tasuki: error NODE_RUNNING: pid {holder(node.state_dir, name=NODE_LOCK)} already runs a node on"
    )
    assert acquire(coordinator, PHASE_TRAIN).phase == PHASE_TRAIN
