"""Life of a coordinator process: stop, kill, restart, and waiting for services."""

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tasuki.config.paths import log_path, node_targets
from tasuki.config.save import save_config
from tasuki.config.schema import CoordinatorConfig, ModelConfig, NodeConfig
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import trainer_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.v1.types_pb2 import PHASE_ROLLOUT, PHASE_TRAIN, STAGE_UNSPECIFIED, CommandId
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import TasukiError, from_rpc_error
from tests.integration.coordinator_process import DEADLINE_S, TO_ROLLOUT, Node, coordinators, running_coordinator


@pytest.fixture
async def node(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Node]:
    async with running_coordinator(tmp_path, metrics_port=unused_tcp_port) as node:
        yield node


async def test_second_coordinator_is_refused_before_it_touches_anything(node: Node) -> None:
    second = await node.start()
    assert await asyncio.wait_for(second.wait(), DEADLINE_S) == 2
    log = log_path(node.config.state_dir, "coordinator").read_text()
    assert f"tasuki: error NODE_RUNNING: pid {node.process.pid} already runs a coordinator on" in log
    assert (await node.state()).epoch == 1
    assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_restart_bumps_the_epoch_and_the_services_refuse_the_old_one(node: Node, number: signal.Signals) -> None:
    await node.acquire(PHASE_ROLLOUT, "before")
    await node.restart(number)
    state = await node.state()
    assert (state.epoch, state.phase, state.policy_version, state.num_changeovers) == (2, PHASE_ROLLOUT, 0, 1)
    assert (await old_command(node, epoch=1)).reason == "STALE_EPOCH"  # no command of the new coordinator has arrived yet
    await node.acquire(PHASE_TRAIN)
    assert (await old_command(node, epoch=1)).reason == "STALE_EPOCH"
    replayed = await node.acquire(PHASE_ROLLOUT, "before")
    assert [one.event.stage for one in replayed] == [*TO_ROLLOUT, STAGE_UNSPECIFIED]
    assert (await node.state()).phase == PHASE_TRAIN


async def old_command(node: Node, *, epoch: int) -> TasukiError:
    """Returns the trainer's error for a stage command of `epoch`."""
    async with open_channel(node_targets(node.config)["trainer"]) as channel:
        command = CommandId(epoch=epoch, sequence=99, request_id=f"{uuid.uuid4()}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await TrainerServiceStub(channel).PublishWeights(
                trainer_pb2.PublishWeightsRequest(command=command), timeout=DEADLINE_S
            )
    return from_rpc_error(refused.value)


async def test_services_that_stay_away_are_named(tmp_path: Path) -> None:
    config = NodeConfig(
        state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path), coordinator=CoordinatorConfig(stage_timeout_s=1)
    )
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    async with coordinators(config) as start, open_channel(node_targets(config)["coordinator"]) as channel:
        process = await start()
        call = CoordinatorServiceStub(channel).Acquire(
            pb.AcquireRequest(phase=PHASE_ROLLOUT), timeout=DEADLINE_S, wait_for_ready=True
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        error = from_rpc_error(refused.value)
        assert (error.reason, error.metadata["peer"]) == ("PEER_UNAVAILABLE", "rollout")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
