"""A rollout service process with a real engine, a client of it, and a trainer inside this process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.config import paths
from tasuki.config.load import load_config, save_config
from tasuki.v1 import (
    memory_pb2,
    memory_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    types_pb2,
    weights_pb2,
)
from tasuki.weights.export import WeightExport
from tasuki.wire.address import unix_target
from tasuki.wire.channel import open_channel
from tests.choices import write_plan
from tests.conftest import ENVIRONMENT
from tests.models import trainer_shards
from tests.pulses import engine_rank_pids

START_TIMEOUT_S = 400.0


CALL_TIMEOUT_S = 60.0


NUM_TRAINER_RANKS = 2


@dataclass
class RolloutProcess:
    """A running `python -m tasuki.rollout`."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    log: Path
    environment: dict[str, str]

    @property
    def target(self) -> str:
        return unix_target(self.state_dir, service="rollout")

    @property
    def socket_dir(self) -> Path:
        return paths.socket_dir(self.state_dir)

    async def generate_health(self) -> int:
        """Returns the status that its health service reports for Generate."""
        async with open_channel(self.target) as channel:
            request = health_pb2.HealthCheckRequest(service="tasuki.v1.RolloutService/Generate")
            return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)).status


@dataclass
class TestTrainer:
    """Trainer side of the weight exchange: two ranks' shards of one model, published from this process."""

    __test__ = False
    socket_dir: Path
    boot_id: str
    model: torch.nn.Module
    dtype: torch.dtype = torch.bfloat16
    exports: list[WeightExport] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(NUM_TRAINER_RANKS):
            self.exports.append(
                WeightExport(
                    trainer_shards(self.model, rank=rank, num_ranks=NUM_TRAINER_RANKS),
                    rank=rank,
                    num_ranks=NUM_TRAINER_RANKS,
                    dtype=self.dtype,
                    socket_path=self.socket_dir / f"{self.boot_id}-{rank}.sock",
                )
            )

    def publish(self, version: int) -> weights_pb2.PublishedWeights:
        for export in self.exports:
            export.publish(version)
        return self.handles(version)

    def handles(self, version: int) -> weights_pb2.PublishedWeights:
        return weights_pb2.PublishedWeights(
            policy_version=version, boot_id=self.boot_id, handles=[export.handle() for export in self.exports]
        )

    def close(self) -> None:
        for export in self.exports:
            export.close()


class RolloutClient:
    """Calls of one test, with increasing command ids."""

    _sequence = 0

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.memory = memory_pb2_grpc.MemoryServiceStub(channel)
        self.metrics = metrics_pb2_grpc.MetricsServiceStub(channel)

    def command(self) -> types_pb2.CommandId:
        RolloutClient._sequence += 1
        number = RolloutClient._sequence
        return types_pb2.CommandId(epoch=1, sequence=number, request_id=f"test-{number}")

    async def look(self) -> None:
        """Reads the service's state, as a coordinator does before its first command."""
        await self.rollout.GetRolloutState(rollout_pb2.GetRolloutStateRequest(epoch=1), timeout=CALL_TIMEOUT_S)

    async def state(self) -> rollout_pb2.GetRolloutStateResponse:
        return await self.rollout.GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=CALL_TIMEOUT_S)

    async def metric(self, name: str) -> float:
        """Value of a metric without labels."""
        told = await self.metrics.GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=CALL_TIMEOUT_S)
        values = {line.split()[0]: float(line.split()[1]) for line in told.text.decode().splitlines() if line.count(" ") == 1}
        return values[name]

    async def resume(self, stage: types_pb2.Stage, *tags: types_pb2.MemoryTag) -> memory_pb2.ResumeResponse:
        request = memory_pb2.ResumeRequest(command=self.command(), stage=stage, tags=tags)
        return await self.memory.Resume(request, timeout=CALL_TIMEOUT_S)

    async def pause(self, stage: types_pb2.Stage, *tags: types_pb2.MemoryTag) -> memory_pb2.PauseResponse:
        request = memory_pb2.PauseRequest(command=self.command(), stage=stage, tags=tags)
        return await self.memory.Pause(request, timeout=CALL_TIMEOUT_S)

    async def receive(self, weights: weights_pb2.PublishedWeights) -> rollout_pb2.ReceiveWeightsResponse:
        request = rollout_pb2.ReceiveWeightsRequest(command=self.command(), weights=weights)
        return await self.rollout.ReceiveWeights(request, timeout=CALL_TIMEOUT_S)

    async def drain(self, *, grace_ms: int = 0) -> rollout_pb2.DrainResponse:
        request = rollout_pb2.DrainRequest(command=self.command(), grace_ms=grace_ms)
        return await self.rollout.Drain(request, timeout=CALL_TIMEOUT_S)

    async def wake(self, weights: weights_pb2.PublishedWeights) -> rollout_pb2.ReceiveWeightsResponse:
        """Runs rollout's three stages from TRAIN to ROLLOUT."""
        await self.resume(types_pb2.STAGE_RESUME_WEIGHTS, types_pb2.MEMORY_TAG_WEIGHTS)
        received = await self.receive(weights)
        await self.resume(types_pb2.STAGE_RESUME_KV, types_pb2.MEMORY_TAG_KV_CACHE)
        return received

    async def sleep(self) -> None:
        """Puts the service to sleep from any stage, unless it is poisoned."""
        stage = (await self.state()).stage
        if stage == types_pb2.STAGE_RESUME_KV:
            await self.drain()
        if stage in (types_pb2.STAGE_RESUME_KV, types_pb2.STAGE_DRAIN):
            await self.pause(types_pb2.STAGE_PAUSE_KV, types_pb2.MEMORY_TAG_KV_CACHE)
        if stage not in (types_pb2.STAGE_UNSPECIFIED, types_pb2.STAGE_PAUSE_WEIGHTS):
            await self.pause(types_pb2.STAGE_PAUSE_WEIGHTS, types_pb2.MEMORY_TAG_WEIGHTS)

    async def generate(self, prompts: list[list[int]], **arguments: Any) -> list[types_pb2.Sample]:
        request = generate_request(prompts, **arguments)
        answers = self.rollout.Generate(request, timeout=CALL_TIMEOUT_S)
        return [sample async for answer in answers for sample in answer.samples]


def generate_request(
    prompts: list[list[int]],
    *,
    num_samples: int = 1,
    first_prompt: int = 0,
    request_id: str = "",
    session_key: str = "",
    **sampling: object,
) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id=request_id,
        session_key=session_key,
        prompts=[rollout_pb2.Prompt(token_ids=prompt) for prompt in prompts],
        num_samples=num_samples,
        first_prompt=first_prompt,
        sampling_params=types_pb2.SamplingParams(**sampling),
    )


def start_rollout(
    state_dir: Path, model: Path, *overrides: str, environment: Mapping[str, str] = MappingProxyType({})
) -> RolloutProcess:
    """Starts the service and returns at once. environment: added to that of the tests."""
    state_dir.mkdir(parents=True, exist_ok=True)
    config = state_dir / "node.toml"
    config.write_text(f'state_dir = "{state_dir}"\n[model]\npath = "{model}"\n[rollout]\nengine.max_total_tokens = 4096\n')
    effective = load_config(config, overrides=overrides)
    save_config(effective, config)
    write_plan(effective)
    log = state_dir / "rollout.log"
    command = [sys.executable, "-m", "tasuki.rollout", "--config", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stderr=output, stdout=output, env={**ENVIRONMENT, **environment}, start_new_session=True
        )
    return RolloutProcess(process, state_dir, log, ENVIRONMENT)


def wait_until_serving(rollout: RolloutProcess) -> None:
    started = time.monotonic()
    while "event=serving" not in rollout.log.read_text():
        if rollout.process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
            stop_rollout(rollout)
            pytest.fail(f"rollout did not start:\n{rollout.log.read_text()[-4000:]}")
        time.sleep(0.1)


def stop_rollout(rollout: RolloutProcess) -> int:
    """Sends SIGTERM and, after a minute, SIGKILL to the whole group. Returns the exit code."""
    rollout.process.send_signal(signal.SIGTERM)
    try:
        return rollout.process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(rollout.process.pid, signal.SIGKILL)
        return rollout.process.wait()


@contextmanager
def serving_rollout(state_dir: Path, model: Path, *overrides: str, **settings: Any) -> Iterator[RolloutProcess]:
    """A service that serves, until the end of the block."""
    rollout = start_rollout(state_dir, model, *overrides, **settings)
    wait_until_serving(rollout)
    try:
        yield rollout
    finally:
        stop_rollout(rollout)


def shared_memory(pids: list[int]) -> set[int]:
    """Returns the inodes of the processes' mappings from /dev/shm."""
    maps = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            maps += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in maps if "/dev/shm/" in line}


def left_of(inodes: set[int]) -> list[str]:
    """Returns the names of those inodes that are still in /dev/shm after 10 seconds."""
    for _ in range(100):
        left = [entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes]
        if not left:
            break
        time.sleep(0.1)
    return left


@asynccontextmanager
async def connected(rollout: RolloutProcess) -> AsyncIterator[RolloutClient]:
    async with open_channel(rollout.target) as channel:
        client = RolloutClient(channel)
        await client.look()
        yield client


@asynccontextmanager
async def asleep(rollout: RolloutProcess) -> AsyncIterator[RolloutClient]:
    """A client of a service that sleeps, as it does again after the block."""
    async with connected(rollout) as client:
        await client.sleep()
        yield client
        await client.sleep()


def log_probs_of(model: torch.nn.Module, prompt: list[int], completion: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of each completion token by transformers, in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


async def until_idle(rollout: RolloutClient) -> int:
    for _ in range(100):
        if (await rollout.state()).num_running == 0:
            return 0
        await asyncio.sleep(0.05)
    return (await rollout.state()).num_running


async def start_samples(
    rollout: RolloutClient, *, num_samples: int = 1, max_new_tokens: int = 250
) -> asyncio.Task[list[types_pb2.Sample]]:
    """Starts samples and returns once all are running. Starts them again if they ended before this was seen."""
    while True:
        settings = {"num_samples": num_samples, "max_new_tokens": max_new_tokens}
        task = asyncio.ensure_future(rollout.generate([[5, 6]], **settings, ignore_eos=True))
        while not task.done():
            if (await rollout.state()).num_running >= num_samples:
                return task
            await asyncio.sleep(0.01)
        await task


@contextmanager
def stopped_engine(process: RolloutProcess) -> Iterator[None]:
    """Stops the engine's ranks: the service accepts samples in the block, and none of them ends."""
    pids = engine_rank_pids(process.state_dir)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def long_call(rollout: RolloutClient, *, num_samples: int) -> AsyncIterator[asyncio.Task[list[types_pb2.Sample]]]:
    """Generates samples that run until they are cancelled; all are running when the block begins."""
    task = await start_samples(rollout, num_samples=num_samples)
    yield task
