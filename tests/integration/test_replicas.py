"""A rollout service with two replicas of its engine: one front, one sync, and requests spread over both.

Replicas compute in float32, so that their log-probs match those of transformers; in bfloat16 every gap would be rounding.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import torch

from tasuki.v1 import memory_pb2, metrics_pb2, types_pb2
from tests.integration.rollout_process import (
    RolloutClient,
    RolloutProcess,
    TestTrainer,
    connected,
    log_probs_of,
    long_call,
    start_rollout,
    start_samples,
    stop_rollout,
    stopped_engine,
    until_idle,
    wait_until_serving,
)
from tests.models import make_model, save_checkpoint
from tests.pulses import engine_rank_pids

pytestmark = pytest.mark.timeout(600)
PROMPTS = [[5, 6, 7], [9, 10], list(range(3, 40))]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutProcess]:
    model = save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("configuration") / "qwen2")
    # The engine starts without weights; the first sync brings them.
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    settings = ["rollout.dp_size=2", 'rollout.dtype="float32"', "rollout.engine.enable_metrics=true"]
    rollout = start_rollout(tmp_path_factory.mktemp("replicas"), model, *settings)
    wait_until_serving(rollout)
    yield rollout
    assert stop_rollout(rollout) == 0, rollout.log.read_text()[-4000:]


@pytest.fixture(scope="module")
def trainer(replicas: RolloutProcess) -> Iterator[TestTrainer]:
    trainer = TestTrainer(replicas.socket_dir, "replicas", make_model("qwen2", seed=3), dtype=torch.float32)
    yield trainer
    trainer.close()


@pytest.fixture
async def client(replicas: RolloutProcess) -> AsyncIterator[RolloutClient]:
    async with connected(replicas) as client:
        yield client
        await client.sleep()


def ranks_of(replicas: RolloutProcess) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in engine_rank_pids(replicas.state_dir)]


async def test_both_replicas_receive_each_version_and_generate_with_it(
    client: RolloutClient, replicas: RolloutProcess, trainer: TestTrainer
) -> None:
    state = await client.state()
    assert (state.dp_size, state.tp_size) == (2, 1)
    usage = await client.memory.GetUsage(memory_pb2.GetUsageRequest(), timeout=60)
    assert {entry.rank for entry in usage.tags} == {0, 1}
    for version in range(2):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.05)
        received = await client.wake(trainer.publish(version))
        assert received.copied_bytes == 2 * sum(4 * parameter.numel() for parameter in trainer.model.parameters())
        before = [rank.cpu_times().user for rank in ranks_of(replicas)]
        samples = await client.generate(PROMPTS, num_samples=12, max_new_tokens=32, temperature=0.7, ignore_eos=True)
        spent = [rank.cpu_times().user - old for rank, old in zip(ranks_of(replicas), before, strict=True)]
        assert len(spent) == 2 and min(spent) > 0.3 * max(spent), "each makes half of the samples"
        assert len(samples) == len({(sample.prompt_index, sample.sample_index) for sample in samples}) == 36
        for sample in samples:
            theirs = log_probs_of(trainer.model, PROMPTS[sample.prompt_index], list(sample.token_ids), temperature=0.7)
            assert torch.allclose(torch.tensor(sample.rollout_log_probs), theirs, atol=2e-5)
        assert len({tuple(sample.token_ids) for sample in samples}) == 36, "no replica draws what another has drawn"
        await client.sleep()


async def test_cancel_and_drain_reach_both_replicas(
    client: RolloutClient, replicas: RolloutProcess, trainer: TestTrainer
) -> None:
    await client.wake(trainer.publish(2))
    async with long_call(client, num_samples=8) as running:
        running.cancel()
        assert await until_idle(client) == 0
    with stopped_engine(replicas):  # so that no sample ends before the drain begins
        running = await start_samples(client, num_samples=8)
        draining = asyncio.ensure_future(client.drain(grace_ms=0))
        await asyncio.sleep(0.5)
    drained, samples = await draining, await running
    assert (drained.num_finished, drained.num_cut) == (0, 8)
    assert {sample.finish_reason for sample in samples} == {types_pb2.FINISH_REASON_CUT}


async def test_a_sessions_turns_find_its_prefix_on_the_replica_that_has_it(
    client: RolloutClient, replicas: RolloutProcess, trainer: TestTrainer
) -> None:
    async def cached_tokens() -> float:
        told = await client.metrics.GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=60)
        lines = told.text.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:cached_tokens_total"))

    await client.wake(trainer.publish(3))
    sessions, num_prefix_tokens, before = {f"s{number}": [number + 3] * 60 for number in range(6)}, 0, await cached_tokens()
    cpu = [rank.cpu_times().user for rank in ranks_of(replicas)]
    for turn in range(4):
        keys = [*sessions][turn:] + [*sessions][:turn]  # in another order each time
        calls = [client.generate([sessions[key]], session_key=key, max_new_tokens=8, ignore_eos=True) for key in keys]
        for key, (sample,) in zip(keys, await asyncio.gather(*calls), strict=True):
            num_prefix_tokens += len(sessions[key]) - 13 if turn else 0  # but the last answer's last token and the 12 after it
            sessions[key] = [*sessions[key], *sample.token_ids, *range(30, 42)]
    assert await cached_tokens() - before >= num_prefix_tokens
    assert all(rank.cpu_times().user > old for rank, old in zip(ranks_of(replicas), cpu, strict=True)), "both have sessions"
