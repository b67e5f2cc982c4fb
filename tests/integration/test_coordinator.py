"""The coordinator as a process of its own, over real gRPC, against services that keep the stage rules."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tasuki.config.places import log_path, node_targets, socket_dir
from tasuki.config.save import save_config
from tasuki.config.schema import CoordinatorConfig, ModelConfig, NodeConfig, RestartConfig, RolloutConfig, TrainerConfig
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1 import trainer_pb2
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.v1.types_pb2 import (
    PHASE_ROLLOUT,
    PHASE_TRAIN,
    PHASE_UNSPECIFIED,
    STAGE_LOAD_TRAINER,
    STAGE_LOAD_WEIGHTS,
    STAGE_OFFLOAD,
    STAGE_RESUME_KV,
    STAGE_RESUME_WEIGHTS,
    STAGE_SYNC,
    STAGE_UNSPECIFIED,
    CommandId,
    Stage,
)
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import OutOfGpuMemory, TasukiError, WeightsCorrupt, from_rpc_error
from tests.integration.stage_services import StageService, serving

DEADLINE_S = 30.0
TO_ROLLOUT = [STAGE_LOAD_WEIGHTS, STAGE_RESUME_WEIGHTS, STAGE_SYNC, STAGE_OFFLOAD, STAGE_RESUME_KV]


@dataclass
class Node:
    """A coordinator process, a stub to it, and the services that it leads."""

    config: NodeConfig
    trainer: StageService
    rollout: StageService
    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    stub: Any

    async def restart(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        await asyncio.wait_for(self.process.wait(), DEADLINE_S)
        self.process = await start_coordinator(self.config)
        await self.settled()

    async def settled(self) -> pb.NodeState:
        """The state once the coordinator has found out where the node stands and has brought it to a phase."""
        while True:
            state = await self.state()
            if state.phase != PHASE_UNSPECIFIED:
                return state
            await asyncio.sleep(0.05)

    async def state(self) -> pb.NodeState:
        return (await self.stub.GetState(pb.GetStateRequest(), timeout=DEADLINE_S, wait_for_ready=True)).state

    def call(self, phase: int, request_id: str = "") -> Any:
        return self.stub.Acquire(pb.AcquireRequest(phase=phase, request_id=request_id), timeout=DEADLINE_S)

    async def acquire(self, phase: int, request_id: str = "") -> list[pb.AcquireResponse]:
        """Raises the TasukiError of the call."""
        try:
            return [response async for response in self.call(phase, request_id)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def run_stage(self, stage: int, request_id: str = "") -> pb.RunStageResponse:
        try:
            return await self.stub.RunStage(pb.RunStageRequest(stage=stage, request_id=request_id), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def start_coordinator(config: NodeConfig) -> asyncio.subprocess.Process:
    log = log_path(config.state_dir, "coordinator")
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        argv = [sys.executable, "-m", "tasuki.coordinator", "--config", str(config.state_dir / "node.toml")]
        return await asyncio.create_subprocess_exec(*argv, stdout=output, stderr=output, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.fixture
async def node(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Node]:
    coordinator = CoordinatorConfig(metrics_port=unused_tcp_port)
    config = NodeConfig(state_dir=tmp_path / "state", model=ModelConfig(path=tmp_path), coordinator=coordinator)
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    async with serving(config) as (trainer, rollout):
        process = await start_coordinator(config)
        channel = open_channel(node_targets(config)["coordinator"])
        node = Node(config, trainer, rollout, process, channel, CoordinatorServiceStub(channel))
        await node.settled()
        yield node
        await channel.close(None)
        node.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(node.process.wait(), DEADLINE_S) == 0
    shutil.rmtree(socket_dir(config.state_dir))


async def test_metrics_are_on_the_port_that_the_configuration_names(node: Node) -> None:
    url = f"http://127.0.0.1:{node.config.coordinator.metrics_port}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)).read().decode()
    assert 'grpc_server_started_total{grpc_method="Acquire",grpc_service="tasuki.v1.CoordinatorService"' in text


async def test_both_directions_with_events_and_versions(node: Node) -> None:
    there = await node.acquire(PHASE_ROLLOUT)
    assert [one.event.stage for one in there if one.event.status == pb.STAGE_STATUS_DONE] == [*TO_ROLLOUT, STAGE_UNSPECIFIED]
    assert (there[-1].state.phase, there[-1].state.policy_version, node.rollout.served) == (PHASE_ROLLOUT, 0, 0)
    back = await node.acquire(PHASE_TRAIN)
    assert (back[-1].state.phase, back[-1].state.num_changeovers) == (PHASE_TRAIN, 2)
    held = await node.acquire(PHASE_TRAIN)
    assert [one.event.status for one in held] == [pb.STAGE_STATUS_HELD]


async def test_every_command_carries_epoch_and_growing_sequence(node: Node) -> None:
    await node.acquire(PHASE_ROLLOUT)
    commands = sorted((*node.trainer.commands, *node.rollout.commands), key=lambda command: command.sequence)
    assert [(command.epoch, command.sequence) for command in commands] == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    assert len({command.request_id for command in commands}) == 5


async def test_state_names_the_targets_and_the_next_stage(node: Node) -> None:
    state = await node.state()
    assert state.trainer_target == node_targets(node.config)["trainer"]
    assert state.rollout_target == node_targets(node.config)["rollout"]
    assert (state.stage, state.next_stage, state.epoch) == (STAGE_LOAD_TRAINER, STAGE_LOAD_WEIGHTS, 1)
    assert not state.HasField("policy_version")


async def test_stage_out_of_order_is_refused_and_everything_goes_on(node: Node) -> None:
    for stage in set(Stage.values()) - {STAGE_UNSPECIFIED, STAGE_LOAD_WEIGHTS}:
        with pytest.raises(TasukiError) as refused:
            await node.run_stage(stage)
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STAGE_ORDER")
        assert refused.value.metadata["allowed"] == "LOAD_WEIGHTS"
    assert node.trainer.commands == node.rollout.commands == []
    assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT


async def test_stages_by_hand_lead_around_and_repeats_get_the_first_answer(node: Node) -> None:
    for stage in TO_ROLLOUT:
        first = await node.run_stage(stage, f"hand-{stage}")
        again = await node.run_stage(stage, f"hand-{stage}")
        assert first == again
        assert (first.event.stage, first.event.status) == (stage, pb.STAGE_STATUS_DONE)
    assert (await node.state()).phase == PHASE_ROLLOUT
    assert len(node.rollout.commands) + len(node.trainer.commands) == 5


async def test_acquire_is_found_again_after_its_caller_left(node: Node) -> None:
    node.rollout.hold[STAGE_SYNC] = asyncio.Event()
    call = node.call(PHASE_ROLLOUT, "mine")
    async for response in call:
        if response.event.stage == STAGE_SYNC:
            break
    call.cancel()
    node.rollout.hold[STAGE_SYNC].set()
    again = await node.acquire(PHASE_ROLLOUT, "mine")
    assert [one.event.stage for one in again if one.event.status == pb.STAGE_STATUS_DONE] == [*TO_ROLLOUT, STAGE_UNSPECIFIED]
    assert sum(command.sequence == 3 for command in node.rollout.commands) == 1


async def test_other_phase_is_refused_while_a_changeover_runs(node: Node) -> None:
    node.rollout.hold[STAGE_SYNC] = asyncio.Event()
    call = node.call(PHASE_ROLLOUT)
    await call.read()
    with pytest.raises(TasukiError) as refused:
        await node.acquire(PHASE_TRAIN)
    assert refused.value.reason == "CHANGEOVER_RUNNING"
    node.rollout.hold[STAGE_SYNC].set()
    assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT


async def test_failed_stage_comes_back_as_its_own_error_and_the_node_is_back_in_train(node: Node) -> None:
    node.rollout.fail[STAGE_RESUME_KV] = OutOfGpuMemory("needs 12.4 GiB for kv_cache, 9.1 GiB free", tag="kv_cache")
    with pytest.raises(OutOfGpuMemory, match=r"9\.1 GiB free") as failed:
        await node.acquire(PHASE_ROLLOUT)
    assert failed.value.metadata["tag"] == "kv_cache"
    state = await node.state()
    assert (state.phase, state.last_error) == (PHASE_TRAIN, "GPU_MEMORY: needs 12.4 GiB for kv_cache, 9.1 GiB free")
    assert (node.trainer.stage, node.rollout.served) == (STAGE_LOAD_TRAINER, None)
    listed = (await node.stub.ListChangeovers(pb.ListChangeoversRequest(), timeout=DEADLINE_S)).changeovers
    assert [event.status for event in listed[0].stages] == [*[pb.STAGE_STATUS_UNDONE] * 4, pb.STAGE_STATUS_FAILED]
    node.rollout.fail.clear()
    assert (await node.acquire(PHASE_ROLLOUT))[-1].state.phase == PHASE_ROLLOUT


async def test_corrupt_weights_are_never_served_and_training_may_go_on(node: Node) -> None:
    node.rollout.fail[STAGE_SYNC] = WeightsCorrupt("lm_head.weight differs", rank=0)
    with pytest.raises(WeightsCorrupt, match=r"lm_head\.weight"):
        await node.acquire(PHASE_ROLLOUT)
    assert ((await node.state()).phase, node.rollout.served) == (PHASE_TRAIN, None)


async def test_watch_gives_the_state_at_once_and_after_every_event(node: Node) -> None:
    watch = node.stub.WatchState(pb.WatchStateRequest())
    first = await watch.read()
    assert (first.state.phase, first.HasField("event")) == (PHASE_TRAIN, False)
    told = [response.event for response in await node.acquire(PHASE_ROLLOUT)]
    assert [(await watch.read()).event for _ in told] == told
    watch.cancel()


async def test_watchers_do_not_keep_the_coordinator_from_stopping(node: Node) -> None:
    watch = node.stub.WatchState(pb.WatchStateRequest())
    await watch.read()
    started = asyncio.get_running_loop().time()
    node.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(node.process.wait(), DEADLINE_S)
    assert asyncio.get_running_loop().time() - started < 2.0
    node.process = await start_coordinator(node.config)
    await node.settled()


async def test_second_coordinator_is_refused_before_it_touches_anything(node: Node) -> None:
    second = await start_coordinator(node.config)
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
    assert (await old_command(node, epoch=1)).reason == "STALE_EPOCH"  # no command of the new one has come yet
    await node.acquire(PHASE_TRAIN)
    assert (await old_command(node, epoch=1)).reason == "STALE_EPOCH"
    replayed = await node.acquire(PHASE_ROLLOUT, "before")
    assert [one.event.stage for one in replayed] == [*TO_ROLLOUT, STAGE_UNSPECIFIED]
    assert (await node.state()).phase == PHASE_TRAIN


async def old_command(node: Node, *, epoch: int) -> TasukiError:
    """What the trainer answers to a stage command of `epoch`."""
    async with open_channel(node_targets(node.config)["trainer"]) as channel:
        command = CommandId(epoch=epoch, sequence=99, request_id=f"{uuid.uuid4()}")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await TrainerServiceStub(channel).PublishWeights(
                trainer_pb2.PublishWeightsRequest(command=command), timeout=DEADLINE_S
            )
    return from_rpc_error(refused.value)


async def test_coordinator_killed_in_the_middle_finds_the_node_and_brings_it_to_train(node: Node) -> None:
    node.rollout.hold[STAGE_SYNC] = asyncio.Event()
    call = node.call(PHASE_ROLLOUT, "cut off")
    async for response in call:
        if response.event.stage == STAGE_SYNC:
            break
    # The event says that the command is on its way.
    await asyncio.wait_for(node.rollout.held.wait(), DEADLINE_S)
    node.process.kill()
    await node.process.wait()
    node.rollout.hold[STAGE_SYNC].set()
    await node.rollout.gate.idle()
    assert (node.trainer.stage, node.rollout.stage) == (STAGE_LOAD_WEIGHTS, STAGE_SYNC)
    node.process = await start_coordinator(node.config)
    state = await node.settled()
    assert (state.phase, state.epoch, node.rollout.served) == (PHASE_TRAIN, 2, None)
    assert (await node.acquire(PHASE_ROLLOUT, "cut off"))[-1].state.phase == PHASE_ROLLOUT
    assert node.rollout.served == 0


async def test_changeovers_are_listed_in_pages_newest_first(node: Node) -> None:
    for phase in (PHASE_ROLLOUT, PHASE_TRAIN, PHASE_ROLLOUT):
        await node.acquire(phase)
    seen, token = [], ""
    while True:
        request = pb.ListChangeoversRequest(page_size=2, page_token=token)
        page = await node.stub.ListChangeovers(request, timeout=DEADLINE_S)
        seen += [(one.changeover_id, one.target, len(one.stages)) for one in page.changeovers]
        token = page.next_page_token
        if not token:
            break
    assert seen == [("c000003", PHASE_ROLLOUT, 5), ("c000002", PHASE_TRAIN, 4), ("c000001", PHASE_ROLLOUT, 5)]


BAD_FIELDS = [
    ("Acquire", pb.AcquireRequest(), "phase"),
    ("Acquire", pb.AcquireRequest(phase=PHASE_TRAIN, request_id="x" * 129), "request_id"),
    ("RunStage", pb.RunStageRequest(), "stage"),
    ("ListChangeovers", pb.ListChangeoversRequest(page_size=1001), "page_size"),
    ("ListChangeovers", pb.ListChangeoversRequest(page_token="first"), "page_token"),
    ("ListChangeovers", pb.ListChangeoversRequest(page_token="9" * 40), "page_token"),
]


async def test_bad_field_is_named(node: Node) -> None:
    for method, request, field in BAD_FIELDS:
        call = getattr(node.stub, method)(request, timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (call.read() if method == "Acquire" else call)
        error = from_rpc_error(refused.value)
        assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_plan_is_told_while_a_changeover_runs(node: Node) -> None:
    (node.config.model.path / "config.json").write_text(
        '{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,'
        ' "max_position_embeddings": 256, "tie_word_embeddings": true}'
    )
    node.rollout.hold[STAGE_SYNC] = asyncio.Event()
    running = asyncio.create_task(node.acquire(PHASE_ROLLOUT))
    await node.rollout.held.wait()
    answer = await node.stub.Plan(pb.PlanRequest(), timeout=DEADLINE_S)
    assert not running.done()
    assert answer.fits
    assert [stage.stage for stage in answer.stages][:3] == ["TRAIN", "LOAD_WEIGHTS", "RESUME_WEIGHTS"]
    assert {device.device for stage in answer.stages for device in stage.devices} == {"host"}
    small = await node.stub.Plan(pb.PlanRequest(host_bytes=10**6), timeout=DEADLINE_S)
    assert (small.fits, small.host_bytes) == (False, 10**6)
    assert small.problems[0].startswith("the host lacks")
    node.rollout.hold[STAGE_SYNC].set()
    assert (await running)[-1].state.phase == PHASE_ROLLOUT


async def test_plan_of_a_model_that_is_not_there_is_refused(node: Node) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.stub.Plan(pb.PlanRequest(), timeout=DEADLINE_S)
    assert from_rpc_error(refused.value).reason == "PATH_NOT_FOUND"


async def test_services_that_stay_away_are_named(tmp_path: Path) -> None:
    config = NodeConfig(
        state_dir=tmp_path / "state",
        model=ModelConfig(path=tmp_path),
        coordinator=CoordinatorConfig(stage_timeout_s=1, recovery_timeout_s=1),
        restart=RestartConfig(stall_s=1, progress_s=1),
        trainer=TrainerConfig(collective_timeout_s=1),
        rollout=RolloutConfig(start_timeout_s=1),
    )
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    process = await start_coordinator(config)
    async with open_channel(node_targets(config)["coordinator"]) as channel:
        call = CoordinatorServiceStub(channel).Acquire(
            pb.AcquireRequest(phase=PHASE_ROLLOUT), timeout=DEADLINE_S, wait_for_ready=True
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["peer"]) == ("PEER_UNAVAILABLE", "rollout")
    process.terminate()
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    shutil.rmtree(socket_dir(config.state_dir))
