"""Ranks that share their micro-batches, over gRPC: the service cuts calls for groups of ranks, and counts a group's answers once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.v1 import loss_pb2
from tests.integration.trainer_process import TrainerClient, TrainerProcess, connect, samples_of_now, start_trainer
from tests.models import make_model, save_checkpoint

SETTINGS = 'compute_dtype = "float32"\nlearning_rate = 1e-3\nmicro_batch_tokens = 64\n'
# It needs the log-probs of whole sequences.
GSPO = loss_pb2.LossConfig(gspo=loss_pb2.GspoLoss(), entropy_coef=0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2", seed=0), tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="module")
def trainers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TrainerProcess]]:
    """One rank alone, and two that share."""
    trainers = [
        start_trainer(tmp_path_factory.mktemp("node"), model, num_ranks=num_ranks, settings=settings)
        for num_ranks, settings in ((1, SETTINGS), (2, f"{SETTINGS}sequence_parallel = 2\n"))
    ]
    for trainer in trainers:
        trainer.wait_until_serving()
    yield trainers
    for trainer in trainers:
        trainer.stop()


async def test_two_ranks_that_share_answer_as_one(trainers: list[TrainerProcess]) -> None:
    answers, steps, scores = [], [], []
    for trainer in trainers:
        async with connect(trainer) as channel:
            client = TrainerClient(channel)
            samples = await samples_of_now(client)
            answers.append(await client.forward_backward(samples, loss=GSPO))
            steps.append(await client.optim_step())
            scores.append(await client.log_probs(samples))
    (alone, shared), (one, other) = answers, steps
    assert (shared.num_samples, shared.num_tokens, shared.num_micro_batches) == (
        alone.num_samples,
        alone.num_tokens,
        alone.num_micro_batches,
    )
    assert shared.loss == pytest.approx(alone.loss, rel=1e-5)
    assert shared.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for mine, theirs in zip(*scores, strict=True):
        assert list(mine) == pytest.approx(list(theirs), abs=1e-5)
