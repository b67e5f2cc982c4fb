"""A whole node as its user has it: real services on a tiny model, the command line, and changeovers both ways."""

import json
from collections.abc import Iterator

import grpc
import pytest

from tasuki.config.load import load_config
from tasuki.config.paths import config_path, node_targets, socket_dir
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import memory_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tasuki.v1.types_pb2 import MEMORY_TAG_EXPORT, PHASE_ROLLOUT, PHASE_TRAIN, STAGE_SYNC
from tests.conftest import RunningNode, called

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


def test_files_of_a_node_are_for_its_user_alone(node: RunningNode) -> None:
    run = socket_dir(node.state_dir)  # private as a whole
    files = [path for path in node.state_dir.rglob("*") if path.is_file() and not path.is_relative_to(run)]
    assert len(files) > 8 and not [path for path in files if path.stat().st_mode & 0o077]


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


def test_state_shows_the_node_as_text_and_as_json(node: RunningNode, coordinator: CoordinatorServiceStub) -> None:
    acquire(coordinator, PHASE_TRAIN)
    text = called("state", node.config)
    assert text.returncode == 0, text.stderr
    assert "LOAD_TRAINER, next LOAD_WEIGHTS" in text.stdout
    told = json.loads(called("state", "--state-dir", node.state_dir, "--json").stdout)
    assert (told["node"]["phase"], told["trainer"]["num_ranks"], told["rollout"]["tp_size"]) == ("PHASE_TRAIN", 2, 1)
    assert {tag["tag"] for tag in told["rollout"]["memory"]["tags"]} >= {"MEMORY_TAG_WEIGHTS", "MEMORY_TAG_KV_CACHE"}
