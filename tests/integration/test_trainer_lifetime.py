"""Failing starts, dying ranks, and checkpoints loaded by another number of ranks."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from tasuki.config.paths import socket_dir, training_log_path
from tasuki.rpc.failpoints import Action, plant
from tasuki.trainer.durable.saves import written_path
from tasuki.trainer.durable.training_log import read_base
from tasuki.v1 import trainer_pb2
from tasuki.wire.errors import from_rpc_error
from tests.extent import only_whole
from tests.integration.fleet_trainers import save_part
from tests.integration.node_process import is_alive
from tests.integration.trainer_process import TrainerClient, TrainerProcess, command, connect, serving_trainer, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.limits import limit_s, wait_for
from tests.models import VOCAB_SIZE, make_model, save_checkpoint
from tests.refusal import refused

STOP_S = limit_s(10.0)
FLOAT32 = 'compute_dtype = "float32"'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("llama", seed=2), tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    """Shared by the tests below, in order; the last one ends it."""
    with serving_trainer(tmp_path_factory.mktemp("node"), model, num_ranks=2, settings=FLOAT32) as trainer:
        yield trainer


def raise_unless_gone(pids: list[int], *, within_s: float) -> None:
    wait_for(lambda: not any(map(is_alive, pids)), within_s)


async def test_two_ranks_save_and_one_goes_on_where_they_were(two_ranks: TrainerProcess, model: Path, tmp_path: Path) -> None:
    samples = make_samples(9, vocab_size=VOCAB_SIZE)
    async with connect(two_ranks) as client:
        await client.forward_backward(samples)
        await client.optim_step(learning_rate=1e-3)
        await client.save(tmp_path / "checkpoint")
        written = await save_part(client, tmp_path / "a**b", trainer_pb2.SAVE_PART_WRITE, "x1")
        assert written.policy_version == 1 and written_path(tmp_path / "a**b", "x1").is_dir()
        await client.forward_backward(samples)
        step_of_two = await client.optim_step(learning_rate=1e-3)
        log_probs_of_two = await client.log_probs(samples)
    with serving_trainer(tmp_path / "other-node", model, num_ranks=1, settings=FLOAT32) as one_rank:
        async with connect(one_rank) as client:
            assert (await client.load(tmp_path / "checkpoint")).policy_version == 1
            assert (await client.state()).policy_version == 1
            await client.forward_backward(samples)
            step_of_one = await client.optim_step(learning_rate=1e-3)
            log_probs_of_one = await client.log_probs(samples)
    assert step_of_one.version == step_of_two.version == 2
    assert step_of_one.grad_norm == pytest.approx(step_of_two.grad_norm, rel=1e-5)
    # The second step is Adam's second: it matches only if both moments and their step count were restored.
    for one, two in zip(log_probs_of_one, log_probs_of_two, strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-4)


async def test_a_save_is_repeated_though_the_trainer_died_after_it(model: Path, tmp_path: Path) -> None:
    samples, path = make_samples(9, vocab_size=VOCAB_SIZE), tmp_path / "saves" / "checkpoint"

    def save(client: TrainerClient, request_id: str) -> Awaitable[trainer_pb2.SaveCheckpointResponse]:
        request = trainer_pb2.SaveCheckpointRequest(command=command(request_id), path=str(path))
        return client.trainer.SaveCheckpoint(request, timeout=60)

    dying = start_trainer(tmp_path / "node", model, num_ranks=1, settings=FLOAT32)
    dying.wait_until_serving()
    async with connect(dying) as client:
        await client.forward_backward(samples)
        await client.optim_step(learning_rate=1e-3)
        plant(socket_dir(dying.state_dir), "trainer", "log.replace", Action.KILL)
        with pytest.raises(grpc.aio.AioRpcError):
            await save(client, "save-1")
    assert dying.process.wait(60) != 0 and path.exists()
    with serving_trainer(tmp_path / "node", model, num_ranks=1, settings=FLOAT32) as again:
        async with connect(again) as client:
            assert (await refused(save(client, "save-2"))).reason == "PATH_EXISTS"
            assert (await save(client, "save-1")).policy_version == 1
            assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]
            await client.load(path)
            await client.forward_backward(samples)
            await client.optim_step(learning_rate=1e-3)
            assert (await refused(save(client, "save-3"))).reason == "PATH_EXISTS"
    assert read_base(training_log_path(tmp_path / "node")) == path
    with serving_trainer(tmp_path / "other", model, num_ranks=1, settings=FLOAT32) as other:
        async with connect(other) as client:
            await client.forward_backward(make_samples(9, seed=1, vocab_size=VOCAB_SIZE))
            await client.optim_step(learning_rate=1e-3)
            assert (await refused(save(client, "save-1"))).reason == "PATH_EXISTS"


async def test_a_rank_that_dies_in_a_call_is_named_and_takes_the_trainer_with_it(two_ranks: TrainerProcess) -> None:
    pids = two_ranks.rank_pids()
    async with connect(two_ranks) as client:
        # While stopped, it blocks the others inside a collective.
        os.kill(pids[1], signal.SIGSTOP)
        call = asyncio.create_task(client.forward_backward(make_samples(8, vocab_size=VOCAB_SIZE)))
        await asyncio.sleep(1.0)
        assert not call.done()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(call, STOP_S)
    assert "rank 1" in from_rpc_error(raised.value).message
    raise_unless_gone([*pids, two_ranks.process.pid], within_s=STOP_S)
    assert two_ranks.process.wait() != 0


@pytest.mark.parametrize("victim", ["launcher", pytest.param("rank 0", marks=only_whole)])
def test_whoever_is_killed_no_process_stays(model: Path, tmp_path: Path, victim: str) -> None:
    trainer = start_trainer(tmp_path / "node", model, num_ranks=2)
    trainer.wait_until_serving()
    pids = trainer.rank_pids()
    os.kill(trainer.process.pid if victim == "launcher" else pids[0], signal.SIGKILL)
    raise_unless_gone([*pids, trainer.process.pid], within_s=STOP_S)
    assert trainer.process.wait() != 0
