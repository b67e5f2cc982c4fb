"""A running trainer, and a client for one test."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from tasuki.config.load import load_config
from tasuki.v1 import (
    loss_pb2,
    memory_pb2,
    memory_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
)
from tasuki.v1.types_pb2 import ROLE_POLICY, TrainingSample
from tasuki.wire.address import unix_target
from tasuki.wire.channel import open_channel
from tests.choices import write_plan
from tests.conftest import ENVIRONMENT
from tests.integration.forked import ForkedModule
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE

START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 60.0
# Token means of PPO against the current policy.
PPO = loss_pb2.LossConfig(name="ppo")
VALUE = loss_pb2.LossConfig(name="value")
TAGS = (types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_GRADIENTS, types_pb2.MEMORY_TAG_OPTIMIZER)


@dataclass
class TrainerProcess:
    process: subprocess.Popen[bytes] | ForkedModule
    state_dir: Path
    log: Path

    @property
    def target(self) -> str:
        return unix_target(self.state_dir, service="trainer")

    def rank_pids(self) -> list[int]:
        """Processes started by the launcher, in order of rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"tasuki.trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "event=serving" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the trainer did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Sends SIGTERM and, after a minute, SIGKILL to the rest of the group."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start_trainer(
    state_dir: Path,
    model: Path,
    *,
    num_ranks: int,
    settings: str = "",
    inside: Sequence[str] = (),
    device: str = "cpu",
    choices: Mapping[str, object] = MappingProxyType({}),
) -> TrainerProcess:
    """Starts the service, optionally with planted faults, and returns at once. settings: further lines of the table [trainer].

    choices: of the planner, other than those of `write_plan`.
    inside: a command that runs it and becomes it, such as `ip netns exec NAME`; without one it is a fork.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    config = state_dir / "node.toml"
    head = f'state_dir = "{state_dir}"\ndevice = "{device}"\n[model]\npath = "{model}"\n'
    config.write_text(f"{head}[trainer]\nnum_ranks = {num_ranks}\n{settings}\n")
    write_plan(load_config(config), **choices)
    preload = ["--preload", "tasuki.trainer.serve"] if device == "cpu" else []
    argv = [
        "tasuki.trainer.launch",
        "--num-ranks",
        str(num_ranks),
        *preload,
        "--",
        "-m",
        "tasuki.trainer",
        "--config",
        str(config),
    ]
    environment = {**os.environ, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    log = state_dir / "trainer.log"
    log.write_bytes(b"")
    if not inside:
        return TrainerProcess(ForkedModule(argv, environment=environment, log=log), state_dir, log)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", *argv], stdout=output, stderr=output, env=environment, start_new_session=True
        )
    return TrainerProcess(process, state_dir, log)


@contextmanager
def serving_trainer(state_dir: Path, model: Path, **settings: Any) -> Iterator[TrainerProcess]:
    """A trainer that serves, until the end of the block. settings: of start_trainer."""
    trainer = start_trainer(state_dir, model, **settings)
    try:
        trainer.wait_until_serving()
        yield trainer
    finally:
        trainer.stop()


class TrainerClient:
    """Calls of one test. Stage commands get increasing sequence numbers of epoch 1 over all tests."""

    _sequence = 0

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        self.memory = memory_pb2_grpc.MemoryServiceStub(channel)
        self._metrics = metrics_pb2_grpc.MetricsServiceStub(channel)

    def stage_command(self) -> types_pb2.CommandId:
        TrainerClient._sequence += 1
        return types_pb2.CommandId(epoch=1, sequence=TrainerClient._sequence, request_id=uuid.uuid4().hex)

    async def look(self) -> None:
        """Reads the service's state, as a coordinator does before its first command."""
        await self.trainer.GetTrainerState(trainer_pb2.GetTrainerStateRequest(epoch=1), timeout=CALL_TIMEOUT_S)

    async def state(self) -> trainer_pb2.GetTrainerStateResponse:
        return await self.trainer.GetTrainerState(trainer_pb2.GetTrainerStateRequest(), timeout=CALL_TIMEOUT_S)

    async def forward_backward(
        self,
        samples: Sequence[types_pb2.TrainingSample],
        *,
        request_id: str = "",
        role: types_pb2.Role.ValueType = ROLE_POLICY,
        loss: loss_pb2.LossConfig = PPO,
        chunk: int = 7,
        log_probs_of: Sequence[int] = (),
    ) -> trainer_pb2.ForwardBackwardResponse:
        header = trainer_pb2.ForwardBackwardHeader(command=command(request_id), role=role, loss=loss, log_probs_of=log_probs_of)

        async def requests() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
            yield trainer_pb2.ForwardBackwardRequest(header=header)
            for start in range(0, len(samples), chunk):
                part = trainer_pb2.TrainingSamples(samples=samples[start : start + chunk])
                yield trainer_pb2.ForwardBackwardRequest(samples=part)

        return await self.trainer.ForwardBackward(requests(), timeout=CALL_TIMEOUT_S)

    async def optim_step(
        self,
        *,
        request_id: str = "",
        role: types_pb2.Role.ValueType = ROLE_POLICY,
        learning_rate: float | None = None,
        schedule_step: int | None = None,
        schedule_steps: int | None = None,
        validate_only: bool = False,
    ) -> trainer_pb2.OptimStepResponse:
        request = trainer_pb2.OptimStepRequest(
            command=command(request_id),
            role=role,
            learning_rate=learning_rate,
            schedule_step=schedule_step,
            schedule_steps=schedule_steps,
            validate_only=validate_only,
        )
        return await self.trainer.OptimStep(request, timeout=CALL_TIMEOUT_S)

    async def begin_run(self, *, keep_optimizer: bool = False) -> trainer_pb2.BeginRunResponse:
        request = trainer_pb2.BeginRunRequest(command=command(), keep_optimizer=keep_optimizer)
        return await self.trainer.BeginRun(request, timeout=CALL_TIMEOUT_S)

    async def discard_gradients(self, role: types_pb2.Role.ValueType = ROLE_POLICY) -> None:
        request = trainer_pb2.DiscardGradientsRequest(command=command(), role=role)
        await self.trainer.DiscardGradients(request, timeout=CALL_TIMEOUT_S)

    async def values(self, samples: Sequence[types_pb2.TrainingSample]) -> list[list[float]]:
        async def requests() -> AsyncIterator[trainer_pb2.ComputeValuesRequest]:
            yield trainer_pb2.ComputeValuesRequest(samples=trainer_pb2.TrainingSamples(samples=samples))

        answers = self.trainer.ComputeValues(requests(), timeout=CALL_TIMEOUT_S)
        return [list(scored.values) async for answer in answers for scored in answer.samples]

    async def metrics(self) -> dict[str, float]:
        """Every metric sample, by its name with labels."""
        answer = await self._metrics.GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=CALL_TIMEOUT_S)
        lines = [line.rpartition(" ") for line in answer.text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def log_probs(
        self, samples: Sequence[types_pb2.TrainingSample], role: types_pb2.Role.ValueType = ROLE_POLICY
    ) -> list[list[float]]:
        async def requests() -> AsyncIterator[trainer_pb2.ComputeLogProbsRequest]:
            header = trainer_pb2.ComputeLogProbsHeader(role=role)
            yield trainer_pb2.ComputeLogProbsRequest(header=header)
            yield trainer_pb2.ComputeLogProbsRequest(samples=trainer_pb2.TrainingSamples(samples=samples))

        answers = self.trainer.ComputeLogProbs(requests(), timeout=CALL_TIMEOUT_S)
        return [list(scored.log_probs) async for answer in answers for scored in answer.samples]

    async def publish(self) -> trainer_pb2.PublishWeightsResponse:
        request = trainer_pb2.PublishWeightsRequest(command=self.stage_command())
        return await self.trainer.PublishWeights(request, timeout=CALL_TIMEOUT_S)

    async def withdraw(self) -> None:
        await self.trainer.WithdrawWeights(
            trainer_pb2.WithdrawWeightsRequest(command=self.stage_command()), timeout=CALL_TIMEOUT_S
        )

    async def pause(
        self, stage: types_pb2.Stage = types_pb2.STAGE_OFFLOAD, tags: Sequence[types_pb2.MemoryTag] = TAGS
    ) -> memory_pb2.PauseResponse:
        request = memory_pb2.PauseRequest(command=self.stage_command(), stage=stage, tags=tags)
        return await self.memory.Pause(request, timeout=CALL_TIMEOUT_S)

    async def resume(
        self, stage: types_pb2.Stage = types_pb2.STAGE_LOAD_TRAINER, tags: Sequence[types_pb2.MemoryTag] = TAGS
    ) -> memory_pb2.ResumeResponse:
        request = memory_pb2.ResumeRequest(command=self.stage_command(), stage=stage, tags=tags)
        return await self.memory.Resume(request, timeout=CALL_TIMEOUT_S)

    async def usage(self) -> memory_pb2.GetUsageResponse:
        return await self.memory.GetUsage(memory_pb2.GetUsageRequest(), timeout=CALL_TIMEOUT_S)

    async def save(self, path: Path) -> trainer_pb2.SaveCheckpointResponse:
        request = trainer_pb2.SaveCheckpointRequest(command=command(), path=str(path))
        return await self.trainer.SaveCheckpoint(request, timeout=CALL_TIMEOUT_S)

    async def load(self, path: Path) -> trainer_pb2.LoadCheckpointResponse:
        request = trainer_pb2.LoadCheckpointRequest(command=command(), path=str(path))
        return await self.trainer.LoadCheckpoint(request, timeout=CALL_TIMEOUT_S)

    async def export(self, path: Path) -> trainer_pb2.ExportModelResponse:
        request = trainer_pb2.ExportModelRequest(command=command(), path=str(path))
        return await self.trainer.ExportModel(request, timeout=CALL_TIMEOUT_S)

    async def back_to_training(self) -> None:
        """Brings the service to LOADED, without gradients, from any stage."""
        await self.look()
        stage = (await self.state()).stage
        if stage == types_pb2.STAGE_OFFLOAD:
            await self.resume()
        if stage == types_pb2.STAGE_LOAD_WEIGHTS:
            await self.withdraw()
        for role in (await self.state()).roles:
            await self.discard_gradients(role.role)


def command(request_id: str = "") -> types_pb2.CommandId:
    return types_pb2.CommandId(request_id=request_id or uuid.uuid4().hex)


@asynccontextmanager
async def connect(trainer: TrainerProcess) -> AsyncIterator[TrainerClient]:
    async with open_channel(trainer.target) as channel:
        yield TrainerClient(channel)


@asynccontextmanager
async def ready_client(trainer: TrainerProcess) -> AsyncIterator[TrainerClient]:
    """A client of a trainer that is ready to train and without gradients, as it is again after the block."""
    async with connect(trainer) as client:
        await client.back_to_training()
        yield client
        await client.back_to_training()


async def samples_of_now(client: TrainerClient, num_samples: int = 12) -> list[TrainingSample]:
    """Makes samples of the trainer's current policy version."""
    return make_samples(num_samples, vocab_size=VOCAB_SIZE, policy_version=(await client.state()).policy_version)
