"""A coordinator process, a stub to it, and the services that it leads."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tasuki.config.load import save_config
from tasuki.config.paths import log_path, node_targets, socket_dir
from tasuki.config.schema import MetricsConfig, ModelConfig, NodeConfig
from tasuki.v1 import coordinator_pb2 as pb
from tasuki.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tasuki.v1.types_pb2 import (
    PHASE_UNSPECIFIED,
    STAGE_LOAD_WEIGHTS,
    STAGE_OFFLOAD,
    STAGE_RESUME_KV,
    STAGE_RESUME_WEIGHTS,
    STAGE_SYNC,
)
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import from_rpc_error
from tests.choices import write_plan
from tests.integration.stage_services import StageRollout, StageTrainer, serving
from tests.limits import limit_s

DEADLINE_S = limit_s(30.0)


TO_ROLLOUT = [STAGE_LOAD_WEIGHTS, STAGE_RESUME_WEIGHTS, STAGE_SYNC, STAGE_OFFLOAD, STAGE_RESUME_KV]


@dataclass
class Node:
    """A coordinator process, a stub to it, and the services that it leads."""

    config: NodeConfig
    trainer: StageTrainer
    rollout: StageRollout
    start: Callable[[], Awaitable[asyncio.subprocess.Process]]
    """Starts a further coordinator."""
    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    stub: Any

    async def restart(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        await asyncio.wait_for(self.process.wait(), DEADLINE_S)
        self.process = await self.start()
        await self.settled()

    async def stop(self) -> None:
        """Sends SIGTERM; the exit code must be 0."""
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(self.process.wait(), DEADLINE_S) == 0

    async def settled(self) -> pb.NodeState:
        """Returns the state once the coordinator has determined the node's stage and brought it to a phase."""
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


@asynccontextmanager
async def coordinators(config: NodeConfig) -> AsyncIterator[Callable[[], Awaitable[asyncio.subprocess.Process]]]:
    """Returns a function that starts a coordinator. At the end it kills those still running and removes the node's sockets."""
    started: list[asyncio.subprocess.Process] = []

    async def start() -> asyncio.subprocess.Process:
        started.append(await _start(config))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()
        shutil.rmtree(socket_dir(config.state_dir), ignore_errors=True)


@asynccontextmanager
async def coordinated(config: NodeConfig, trainer: StageTrainer, rollout: StageRollout) -> AsyncIterator[Node]:
    """Starts a coordinator over these services; kills it at the end if it still runs."""
    async with coordinators(config) as start, open_channel(node_targets(config)["coordinator"]) as channel:
        yield Node(config, trainer, rollout, start, await start(), channel, CoordinatorServiceStub(channel))


async def _start(config: NodeConfig) -> asyncio.subprocess.Process:
    log = log_path(config.state_dir, "coordinator")
    log.parent.mkdir(exist_ok=True)
    write_plan(config)
    with log.open("ab") as output:
        argv = [sys.executable, "-m", "tasuki.coordinator", "--config", str(config.state_dir / "node.toml")]
        tracing = {name: value for name, value in os.environ.items() if name.startswith(("OTEL_", "TASUKI_OTLP_"))}
        environment = {"PYTHONPATH": ":".join(sys.path), **tracing, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        return await asyncio.create_subprocess_exec(*argv, stdout=output, stderr=output, env=environment)


@asynccontextmanager
async def running_coordinator(folder: Path, *, metrics_port: int) -> AsyncIterator[Node]:
    """Starts a node and waits until it is in TRAIN; at the end the coordinator must stop with exit code 0."""
    metrics = MetricsConfig(listen=f"127.0.0.1:{metrics_port}")
    config = NodeConfig(state_dir=folder / "state", model=ModelConfig(path=folder), metrics=metrics)
    async with running_node(config) as node:
        yield node


@asynccontextmanager
async def running_node(config: NodeConfig) -> AsyncIterator[Node]:
    """Starts a node with any configuration whose state folder does not exist yet, and waits for TRAIN as above."""
    config.state_dir.mkdir()
    save_config(config, config.state_dir / "node.toml")
    async with serving(config) as services, coordinated(config, *services) as node:
        await node.settled()
        yield node
        await node.channel.close(None)
        await node.stop()
