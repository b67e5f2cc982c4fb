"""The rollout service process: two engine ranks, failing starts, poison, death, and cleanup."""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tasuki.config import paths
from tasuki.v1 import memory_pb2, types_pb2
from tasuki.wire.errors import EnginePoisoned, WeightsCorrupt
from tests.extent import IS_WHOLE
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    connected,
    left_of,
    log_probs_of,
    serving_rollout,
    shared_memory,
    start_rollout,
    stop_rollout,
)
from tests.limits import limit_s
from tests.models import make_model
from tests.pulses import engine_rank_pids
from tests.refusal import refused

pytestmark = pytest.mark.timeout(600)
WEIGHTS, KV = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE


def children(rollout: RolloutProcess) -> list[psutil.Process]:
    return psutil.Process(rollout.process.pid).children(recursive=True)


def still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes still alive after 10 seconds, or longer beside other tests."""
    return psutil.wait_procs(processes, timeout=limit_s(10))[1]


# --- starts that fail: one clear line, exit code 1, nothing left


def failed_start(state_dir: Path, model: Path, *overrides: str) -> str:
    """Returns the line that says why a start failed."""
    rollout = start_rollout(state_dir, model, *overrides)
    try:
        assert rollout.process.wait(280) == 1
    finally:
        stop_rollout(rollout)
    left = [path.name for path in paths.socket_dir(state_dir).iterdir()]
    assert set(left) <= {"pulse"}
    (line,) = [line for line in rollout.log.read_text().splitlines() if line.startswith("tasuki.rollout:")]
    return line


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path, rollout_model: Path) -> None:
    line = failed_start(tmp_path / "node", rollout_model, "coordinator.stage_timeout_s=1")
    assert line.startswith(
        "tasuki.rollout: DEADLINE_EXCEEDED: the engine did not start within coordinator.stage_timeout_s = 1 s"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGKILL, signal.SIGINT] if IS_WHOLE else [])])
def test_a_start_that_is_stopped_leaves_no_process(tmp_path: Path, rollout_model: Path, number: signal.Signals) -> None:
    rollout = start_rollout(tmp_path / "node", rollout_model)
    try:
        while not (processes := children(rollout)):
            assert rollout.process.poll() is None
            time.sleep(0.02)
        rollout.process.send_signal(number)
        assert rollout.process.wait(limit_s(10)) == (-number if number == signal.SIGKILL else 128 + number)
        assert still_there(processes) == []
        if number != signal.SIGKILL:
            assert not paths.engine_dir(rollout.state_dir).exists()
            assert list(paths.pulse_dir(rollout.state_dir).glob("rollout-*")) == []
    finally:
        stop_rollout(rollout)


# --- two ranks


@pytest.fixture
async def client(engine_pair: RolloutProcess) -> AsyncIterator[RolloutClient]:
    async with connected(engine_pair) as client:
        yield client


@pytest.fixture(scope="module")
def pair_trainer(engine_pair: RolloutProcess) -> Iterator[TestTrainer]:
    trainer = TestTrainer(engine_pair.socket_dir, "pair", make_model("qwen2", seed=2))
    yield trainer
    trainer.close()


async def test_two_ranks_receive_and_generate(client: RolloutClient, pair_trainer: TestTrainer) -> None:
    received = await client.wake(pair_trainer.publish(0))
    (sample,) = await client.generate([[5, 6, 7]], max_new_tokens=8, ignore_eos=True)
    theirs = log_probs_of(pair_trainer.model, [5, 6, 7], list(sample.token_ids))
    assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=0.1)
    # Norms go to both ranks, everything else to one of them.
    shared = sum(p.numel() * 2 for name, p in pair_trainer.model.named_parameters() if "norm" in name)
    everything = sum(p.numel() * 2 for p in pair_trainer.model.parameters())
    assert received.copied_bytes == everything + shared
    usage = await client.memory.GetUsage(memory_pb2.GetUsageRequest(), timeout=60)
    assert sorted((entry.rank, entry.tag) for entry in usage.tags) == [(0, WEIGHTS), (0, KV), (1, WEIGHTS), (1, KV)]
    assert all(entry.mapped_bytes == entry.total_bytes > 0 for entry in usage.tags)
    assert [device.rank for device in usage.devices] == [0, 1]

    await client.drain()
    kv = await client.pause(types_pb2.STAGE_PAUSE_KV, KV)
    weights = await client.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    assert kv.released_bytes + weights.released_bytes == sum(entry.total_bytes for entry in usage.tags)
    usage = await client.memory.GetUsage(memory_pb2.GetUsageRequest(), timeout=60)
    assert [(entry.is_paused, entry.mapped_bytes) for entry in usage.tags] == [(True, 0)] * 4
    await client.wake(pair_trainer.publish(0))
    (again,) = await client.generate([[5, 6, 7]], max_new_tokens=8, temperature=0.0, ignore_eos=True)
    theirs = log_probs_of(pair_trainer.model, [5, 6, 7], list(again.token_ids))
    assert torch.allclose(torch.tensor(again.rollout_log_probs), theirs, atol=0.1)
    await client.sleep()


async def test_corrupt_weights_poison_the_engine(client: RolloutClient, pair_trainer: TestTrainer) -> None:
    await client.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
    weights, later = pair_trainer.publish(1), pair_trainer.handles(2)
    arena = pair_trainer.exports[1]._arena
    name = arena.manifest.entries[3].name
    arena.tensors[3].view(torch.int16).flatten()[-1] ^= 1
    error = await refused(client.receive(weights))
    assert isinstance(error, WeightsCorrupt)
    assert error.metadata["tensors"] == name
    assert "trainer rank 1 changed after it was published" in error.message
    state = await client.state()
    assert (state.is_poisoned, state.HasField("policy_version"), state.HasField("received_version")) == (True, False, False)
    assert name in state.poison_reason
    for call in (client.generate([[5]]), client.receive(later), client.resume(types_pb2.STAGE_RESUME_KV, KV)):
        assert isinstance(await refused(call), EnginePoisoned)
    await client.pause(types_pb2.STAGE_PAUSE_KV, KV)
    await client.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
    assert isinstance(await refused(client.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)), EnginePoisoned)


def test_a_dead_rank_ends_the_service_and_leaves_nothing(tmp_path: Path, rollout_model: Path) -> None:
    with serving_rollout(tmp_path / "node", rollout_model, "rollout.tp_size=2") as rollout:
        processes = children(rollout)
        ranks = engine_rank_pids(rollout.state_dir)
        assert len(ranks) == 2 and set(ranks) <= {process.pid for process in processes}
        shared = shared_memory([rollout.process.pid, *(process.pid for process in processes)])
        os.kill(ranks[1], signal.SIGKILL)
        assert rollout.process.wait(limit_s(15)) == 1
        assert still_there(processes) == []
        assert left_of(shared) == []
        assert "event=engine_lost" in rollout.log.read_text()
        assert {path.name for path in rollout.socket_dir.iterdir()} - {"generate-calls"} == {"pulse", "start-rollout.json"}
