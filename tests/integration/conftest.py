"""One rollout service process with a real engine, shared by the session, and a trainer that is this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
import torch

from tasuki.config import places
from tasuki.transport.export import WeightExport
from tasuki.v1 import memory_pb2, memory_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2, weights_pb2
from tasuki.wire.channel import open_channel
from tests.conftest import ENVIRONMENT
from tests.models import make_model, save_checkpoint, trainer_shards

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 400.0
CALL_TIMEOUT_S = 60.0
NUM_TRAINER_RANKS = 2
# 2 layers, keys and values, 2 heads of 16, bfloat16: 1 GiB.
KV_CACHE_TOKENS = (1 << 30) // (2 * 2 * 2 * 16 * 2)


@dataclass
class RolloutProcess:
    """A running `python -m tasuki.rollout`, seen from outside."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    log: Path
    environment: dict[str, str]
    seconds_to_start: float = 0.0

    @property
    def target(self) -> str:
        return places.grpc_target(self.state_dir, service="rollout", listen="unix")

    @property
    def socket_dir(self) -> Path:
        return places.socket_dir(self.state_dir)


@dataclass
class TestTrainer:
    """The trainer's end of the weight exchange: two ranks' shards of one model, published from this process."""

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
    """Calls of one test, with command ids that grow."""

    _sequence = 0

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.memory = memory_pb2_grpc.MemoryServiceStub(channel)

    def command(self) -> types_pb2.CommandId:
        RolloutClient._sequence += 1
        number = RolloutClient._sequence
        return types_pb2.CommandId(epoch=1, sequence=number, request_id=f"test-{number}")

    async def look(self) -> None:
        """As a coordinator does before its first command."""
        await self.rollout.GetRolloutState(rollout_pb2.GetRolloutStateRequest(epoch=1), timeout=CALL_TIMEOUT_S)

    async def state(self) -> rollout_pb2.GetRolloutStateResponse:
        return await self.rollout.GetRolloutState(rollout_pb2.GetRolloutStateRequest(), timeout=CALL_TIMEOUT_S)

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
        """TRAIN -> ROLLOUT, the three stages of rollout."""
        await self.resume(types_pb2.STAGE_RESUME_WEIGHTS, types_pb2.MEMORY_TAG_WEIGHTS)
        received = await self.receive(weights)
        await self.resume(types_pb2.STAGE_RESUME_KV, types_pb2.MEMORY_TAG_KV_CACHE)
        return received

    async def sleep(self) -> None:
        """Back to asleep from wherever the service is, but for poison."""
        stage = (await self.state()).stage
        if stage == types_pb2.STAGE_RESUME_KV:
            await self.drain()
        if stage in (types_pb2.STAGE_RESUME_KV, types_pb2.STAGE_DRAIN):
            await self.pause(types_pb2.STAGE_PAUSE_KV, types_pb2.MEMORY_TAG_KV_CACHE)
        if stage not in (types_pb2.STAGE_UNSPECIFIED, types_pb2.STAGE_PAUSE_WEIGHTS):
            await self.pause(types_pb2.STAGE_PAUSE_WEIGHTS, types_pb2.MEMORY_TAG_WEIGHTS)

    async def generate(self, prompts: list[list[int]], *, num_samples: int = 1, **sampling: object) -> list[types_pb2.Sample]:
        request = generate_request(prompts, num_samples=num_samples, **sampling)
        answers = self.rollout.Generate(request, timeout=CALL_TIMEOUT_S)
        return [sample async for answer in answers for sample in answer.samples]


def generate_request(prompts: list[list[int]], *, num_samples: int = 1, **sampling: object) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        prompts=[rollout_pb2.Prompt(token_ids=prompt) for prompt in prompts],
        num_samples=num_samples,
        sampling_params=types_pb2.SamplingParams(**sampling),
    )


def start_rollout(state_dir: Path, model: Path, *overrides: str) -> RolloutProcess:
    """Starts the service and returns at once."""
    state_dir.mkdir(parents=True, exist_ok=True)
    config = state_dir / "node.toml"
    config.write_text(f'state_dir = "{state_dir}"\n[model]\npath = "{model}"\n[rollout]\nmax_total_tokens = 4096\n')
    log = state_dir / "rollout.log"
    command = [sys.executable, "-m", "tasuki.rollout", "--config", str(config)]
    for override in overrides:
        command += ["--set", override]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output, env=ENVIRONMENT, start_new_session=True)
    return RolloutProcess(process, state_dir, log, ENVIRONMENT)


def wait_until_serving(rollout: RolloutProcess) -> None:
    started = time.monotonic()
    while "event=serving" not in rollout.log.read_text():
        if rollout.process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
            stop_rollout(rollout)
            pytest.fail(f"rollout did not start:\n{rollout.log.read_text()[-4000:]}")
        time.sleep(0.1)
    rollout.seconds_to_start = time.monotonic() - started


def stop_rollout(rollout: RolloutProcess) -> int:
    """SIGTERM, and after 20 seconds SIGKILL to its whole group. Returns the exit code."""
    rollout.process.send_signal(signal.SIGTERM)
    try:
        return rollout.process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(rollout.process.pid, signal.SIGKILL)
        return rollout.process.wait()


def shared_memory(pids: list[int]) -> set[int]:
    """Inodes of what the processes have mapped from /dev/shm."""
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
    return {int(line[4]) for line in lines}


def left_of(inodes: set[int]) -> list[str]:
    """Names of those that are still in /dev/shm 10 seconds from now."""
    for _ in range(100):
        left = [entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes]
        if not left:
            break
        time.sleep(0.1)
    return left


@pytest.fixture(scope="session")
def rollout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the shared engine is started from; what the tests publish has other weights."""
    return save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="session")
def rollout_process(rollout_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    rollout = start_rollout(tmp_path_factory.mktemp("node"), rollout_model, f"rollout.max_total_tokens={KV_CACHE_TOKENS}")
    wait_until_serving(rollout)
    yield rollout
    ranks = psutil.Process(rollout.process.pid).children(recursive=True)
    shared = shared_memory([rollout.process.pid, *(rank.pid for rank in ranks)])
    assert stop_rollout(rollout) == 0, rollout.log.read_text()[-4000:]
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert left_of(shared) == []
    assert sorted(path.name for path in rollout.socket_dir.iterdir()) == ["pulse"]


@pytest.fixture(scope="session")
def trainer(rollout_process: RolloutProcess) -> Iterator[TestTrainer]:
    """A trainer whose weights are not those that the engine was started with."""
    trainer = TestTrainer(rollout_process.socket_dir, "trainer", make_model("qwen2", seed=1))
    yield trainer
    trainer.close()


@asynccontextmanager
async def connected(rollout: RolloutProcess) -> AsyncIterator[RolloutClient]:
    async with open_channel(rollout.target) as channel:
        client = RolloutClient(channel)
        await client.look()
        yield client


@pytest.fixture
async def rollout(rollout_process: RolloutProcess) -> AsyncIterator[RolloutClient]:
    """The shared service, asleep at the start of each test."""
    async with connected(rollout_process) as client:
        await client.sleep()
        yield client
        await client.sleep()
