"""The coordinator as a separate process, over real gRPC, with services that keep the stage rules; its stop, kill and restart."""

import asyncio
import re
import signal
import urllib.request
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tasuki.config.load import save_config
from tasuki.config.paths import log_path, node_targets
from tasuki.config.schema import CoordinatorConfig, ModelConfig, NodeConfig
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import trainer_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.v1.types_pb2 import (
    PHASE_ROLLOUT,
    PHASE_TRAIN,
    STAGE_DRAIN,
    STAGE_LOAD_TRAINER,
    STAGE_LOAD_WEIGHTS,
    STAGE_PAUSE_KV,
    STAGE_UNSPECIFIED,
    CommandId,
)
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import TasukiError, from_rpc_error
from tasuki.wire.stages import Stage
from tests.integration.coordinator_process import DEADLINE_S, TO_ROLLOUT, Node, coordinators, running_coordinator


@pytest.fixture
async def node(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Node]:
    async with running_coordinator(tmp_path, metrics_port=unused_tcp_port) as node:
        yield node


async def test_changeovers_both_ways_are_told_by_events_state_metrics_and_pages(node: Node) -> None:
    state = await node.state()
    assert (state.trainer_target, state.rollout_target) == tuple(
        node_targets(node.config)[name] for name in ("trainer", "rollout")
    )
    assert (state.stage, state.next_stage, state.epoch) == (STAGE_LOAD_TRAINER, STAGE_LOAD_WEIGHTS, 1)
    assert not state.HasField("policy_version")
    there = await node.acquire(PHASE_ROLLOUT)
    assert [one.event.stage for one in there if one.event.status == pb.STAGE_STATUS_DONE] == [*TO_ROLLOUT, STAGE_UNSPECIFIED]
    assert (there[-1].state.phase, there[-1].state.policy_version, node.rollout.served) == (PHASE_ROLLOUT, 0, 0)
    check_metrics(await scraped(node))
    back = await node.acquire(PHASE_TRAIN)
    assert (back[-1].state.phase, back[-1].state.num_changeovers) == (PHASE_TRAIN, 2)
    done = {one.event.stage: one.event.bytes for one in back if one.event.status == pb.STAGE_STATUS_DONE}
    assert (done[STAGE_DRAIN], done[STAGE_PAUSE_KV]) == (0, 500)
    held = await node.acquire(PHASE_TRAIN)
    assert [one.event.status for one in held] == [pb.STAGE_STATUS_HELD]
    await node.acquire(PHASE_ROLLOUT)
    first = await node.stub.ListChangeovers(pb.ListChangeoversRequest(page_size=2), timeout=DEADLINE_S)
    request = pb.ListChangeoversRequest(page_size=2, page_token=first.next_page_token)
    last = await node.stub.ListChangeovers(request, timeout=DEADLINE_S)
    seen = [[(one.changeover_id, one.target, len(one.stages)) for one in page.changeovers] for page in (first, last)]
    assert seen == [[("c000003", PHASE_ROLLOUT, 5), ("c000002", PHASE_TRAIN, 4)], [("c000001", PHASE_ROLLOUT, 5)]]
    assert not last.next_page_token


def check_metrics(text: str) -> None:
    method = 'grpc_method="Acquire",grpc_service="tasuki.v1.CoordinatorService",grpc_type="server_stream",service="coordinator"'
    assert f"grpc_server_started_total{{{method}}} 1.0" in text
    assert 'grpc_service="tasuki.v1.TrainerService",grpc_type="server_stream"' not in text
    assert 'tasuki_service_up{service="trainer"} 1.0' in text and 'tasuki_phase{phase="ROLLOUT"} 1.0' in text
    assert 'tasuki_changeovers_total{service="coordinator",status="DONE",target="ROLLOUT"} 1.0' in text
    assert 'tasuki_stage_seconds_count{service="coordinator",stage="SYNC",status="DONE"} 1.0' in text
    seconds = re.search(r'tasuki_gpu_seconds_total\{service="coordinator",use="changeover"\} (\S+)', text)
    assert seconds is not None and float(seconds[1]) > 0


async def scraped(node: Node) -> str:
    return (
        (await asyncio.to_thread(urllib.request.urlopen, f"http://{node.config.metrics.listen}/metrics", timeout=60))
        .read()
        .decode()
    )


async def test_plan_is_told_while_a_changeover_runs(node: Node) -> None:
    (node.config.model.path / "config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,'
        ' "max_position_embeddings": 256, "tie_word_embeddings": true}'
    )
    node.rollout.hold[Stage.SYNC] = asyncio.Event()
    running = asyncio.create_task(node.acquire(PHASE_ROLLOUT))
    await node.rollout.reached.wait()
    answer = await node.stub.Plan(pb.PlanRequest(), timeout=DEADLINE_S)
    assert not running.done()
    assert answer.fits
    assert [stage.stage for stage in answer.stages][:3] == ["TRAIN", "LOAD_WEIGHTS", "RESUME_WEIGHTS"]
    assert {device.device for stage in answer.stages for device in stage.devices} == {"host"}
    small = await node.stub.Plan(pb.PlanRequest(host_bytes=10**6), timeout=DEADLINE_S)
    assert (small.fits, small.host_bytes) == (False, 10**6)
    assert small.problems[0].startswith("the host needs")
    node.rollout.hold[Stage.SYNC].set()
    assert (await running)[-1].state.phase == PHASE_ROLLOUT


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
