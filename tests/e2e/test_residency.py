"""Tags that stay over a changeover of a whole node: stages that move nothing, lost services, and a budget that holds only some of them."""

import os
import signal
from collections.abc import Sequence

import grpc
import pytest

from tasuki.client import Client, Phase, Stage, StageStatus
from tasuki.config.load import load_config
from tasuki.config.paths import config_path, node_targets
from tasuki.planner.choose import plan_node
from tasuki.planner.node import Part
from tasuki.v1 import memory_pb2, types_pb2
from tasuki.v1.memory_pb2_grpc import MemoryServiceStub
from tests.chaos_node import ChaosNode
from tests.conftest import RunningNode, started_node, tasuki
from tests.extent import only_whole

pytestmark = pytest.mark.timeout(600)
SERVICES = ("trainer", "rollout")
_MOVED_BY_SYNC = {Stage.LOAD_WEIGHTS, Stage.SYNC}


def tags(node: RunningNode) -> dict[str, Sequence[types_pb2.TagUsage]]:
    targets = node_targets(load_config(config_path(node.state_dir)))
    found: dict[str, Sequence[types_pb2.TagUsage]] = {}
    for service in SERVICES:
        with grpc.insecure_channel(targets[service]) as channel:
            found[service] = MemoryServiceStub(channel).GetUsage(memory_pb2.GetUsageRequest(), timeout=30).tags
    return found


def round_bytes(client: Client) -> dict[Stage, int]:
    """Bytes that every stage of a round trip moved."""
    events = [*client.acquire(Phase.ROLLOUT), *client.acquire(Phase.TRAIN)]
    return {
        Stage.known(event.stage): event.bytes
        for event in events
        if event.stage and StageStatus.of(event.status) is StageStatus.DONE
    }


def test_where_everything_stays_every_stage_is_written_down_and_moves_nothing(roomy: RunningNode) -> None:
    with Client(state_dir=roomy.state_dir) as client:
        client.acquire(Phase.TRAIN)
        round_bytes(client)  # allocates the published weights
        moved = round_bytes(client)
        assert {stage for stage, size in moved.items() if size} == _MOVED_BY_SYNC and len(moved) == 9
        assert [len(one.stages) for one in client.changeovers(limit=4)] == [4, 5] * 2
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            client.acquire(phase)
            every = [tag for service in SERVICES for tag in tags(roomy)[service]]
            assert all(tag.stays and not tag.is_paused and tag.mapped_bytes == tag.total_bytes for tag in every)
    shown = tasuki("state", roomy.config, timeout_s=60).stdout
    assert "kv_cache (stays)" in shown and "optimizer (stays)" in shown


@only_whole
def test_an_engine_that_is_lost_while_the_trainer_works_finds_room(roomy: RunningNode) -> None:
    with Client(state_dir=roomy.state_dir) as client:
        chaos = ChaosNode(roomy, client)
        client.acquire(Phase.TRAIN)
        chaos.step()
        client.acquire(Phase.ROLLOUT)
        tokens = chaos.greedy()
        client.acquire(Phase.TRAIN)
        (pid,) = chaos.pids("rollout")
        os.kill(pid, signal.SIGKILL)
        client.acquire(Phase.ROLLOUT)
        assert chaos.greedy() == tokens
        made_room = [
            event.bytes for one in client.changeovers(limit=5) for event in one.stages
            if (event.stage, event.status) == (Stage.LOAD_TRAINER.number, StageStatus.UNDONE.number)
        ]  # fmt: skip
        assert made_room and made_room[0] > 0, "what stays has left as well"
        assert all(tag.stays and not tag.is_paused for tag in tags(roomy)["trainer"])


@only_whole
@pytest.mark.parametrize("process", ["trainer1", "scheduler0"])
def test_a_service_that_is_lost_while_rollout_serves_comes_back_beside_what_stays(roomy: RunningNode, process: str) -> None:
    with Client(state_dir=roomy.state_dir) as client:
        ChaosNode(roomy, client).lose(process, phase=Phase.ROLLOUT)


@only_whole
def test_a_budget_lets_as_much_stay_as_it_holds(roomy: RunningNode) -> None:
    config = load_config(config_path(roomy.state_dir))
    of_tags = {Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.EXPORT, Part.ROLLOUT_WEIGHTS, Part.KV_CACHE}
    planned = plan_node(config, gpu_bytes=1, host_bytes=10**12)
    everything = max(
        sum(size for parts in stage.gpus for part, size in parts.items() if part in of_tags) for stage in planned.stages
    )
    budget = everything - 1
    with started_node(choices={}, overrides=[f"memory.host_budget_bytes={budget}"]) as tight:
        with Client(state_dir=tight.state_dir) as client:
            round_bytes(client)
            moved = round_bytes(client)
            for phase in (Phase.ROLLOUT, Phase.TRAIN):
                client.acquire(phase)
                every = [tag for service in SERVICES for tag in tags(tight)[service]]
                assert sum(tag.mapped_bytes + tag.kept_bytes for tag in every) <= budget
                assert any(tag.stays for tag in every) and not all(tag.stays for tag in every)
                assert all(tag.stays <= (not tag.is_paused) for tag in every)
        assert {stage for stage, size in moved.items() if size} > _MOVED_BY_SYNC
