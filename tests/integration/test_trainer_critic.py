"""The trainer service of two ranks with a critic: runs, and their recovery by a restarted trainer."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tasuki.v1 import types_pb2
from tasuki.v1.types_pb2 import ROLE_CRITIC, ROLE_POLICY, TrainingSample
from tests.integration.plain_critic import value_samples
from tests.integration.trainer_process import VALUE, TrainerClient, TrainerProcess, connect, serving_trainer, start_trainer
from tests.models import make_model, save_checkpoint
from tests.refusal import refused

SETTINGS = """
compute_dtype = "float32"
on_non_finite = "skip"
micro_batch_tokens = 128
learning_rate = 1e-3
lr_schedule = "linear"
[trainer.critic]
learning_rate = 1e-2
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("qwen2_tied", seed=5), tmp_path_factory.mktemp("critic-model") / "qwen2")


@pytest.fixture(scope="module")
def trainer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    with serving_trainer(tmp_path_factory.mktemp("critic-node"), model, num_ranks=2, settings=SETTINGS) as trainer:
        yield trainer


@pytest.fixture
async def client(trainer: TrainerProcess) -> AsyncIterator[TrainerClient]:
    async with connect(trainer) as client:
        await client.back_to_training()
        yield client


async def facts(client: TrainerClient) -> dict[types_pb2.Role.ValueType, tuple[int, int, bool]]:
    """Version, start of the schedule, and whether there are gradients, by role."""
    roles = (await client.state()).roles
    return {role.role: (role.version, role.schedule_start, role.has_gradients) for role in roles}


async def step_rates(client: TrainerClient, samples: list[TrainingSample], num_steps: int) -> list[float]:
    """Learning rates of `num_steps` steps of the policy."""
    rates: list[float] = []
    for _ in range(num_steps):
        await client.forward_backward(samples)
        rates.append((await client.optim_step(schedule_steps=2)).learning_rate)
    return rates


async def test_a_critic_learns_beside_the_policy(client: TrainerClient) -> None:
    samples = value_samples(12)
    assert {value for row in await client.values(samples) for value in row} == {0.0}
    before = await client.log_probs(samples)
    losses: list[float] = []
    for version in (1, 2, 3, 4):
        answer = await client.forward_backward(samples, role=ROLE_CRITIC, loss=VALUE)
        assert (await facts(client))[ROLE_CRITIC] == (version - 1, 0, True)
        losses.append(answer.loss)
        assert (await client.optim_step(role=ROLE_CRITIC, learning_rate=1e-2)).version == version
    assert losses[-1] < 0.7 * losses[0]
    values = await client.values(samples)
    assert [len(row) for row in values] == [len(sample.completion_token_ids) for sample in samples]
    assert await client.log_probs(samples) == before
    assert (await facts(client))[ROLE_POLICY] == (0, 0, False)
    error = await refused(client.forward_backward(samples, role=ROLE_CRITIC))
    assert error.metadata["field"] == "header.loss.name"
    error = await refused(client.forward_backward(samples, loss=VALUE))
    assert error.metadata["field"] == "header.loss.name"


async def test_a_second_run_on_a_living_node_learns(client: TrainerClient, tmp_path: Path) -> None:
    samples = value_samples(12)
    assert await step_rates(client, samples, 3) == pytest.approx([1e-3, 0.5e-3, 0.0])
    await client.forward_backward(samples)
    assert (await refused(client.begin_run())).reason == "GRADIENTS_PENDING"
    assert (await refused(client.load(tmp_path))).reason == "GRADIENTS_PENDING"
    await client.discard_gradients()
    assert (await client.begin_run()).policy_version == 3
    assert (await facts(client))[ROLE_POLICY] == (3, 3, False)
    before = await client.log_probs(samples)
    assert await step_rates(client, samples, 3) == pytest.approx([1e-3, 0.5e-3, 0.0])
    assert await client.log_probs(samples) != before
    await client.forward_backward(samples)
    assert (await client.optim_step(schedule_step=1, schedule_steps=2)).learning_rate == pytest.approx(0.5e-3)


async def test_a_trainer_started_again_has_both_roles_of_its_checkpoint_and_its_log(
    client: TrainerClient, trainer: TrainerProcess, model: Path, tmp_path: Path
) -> None:
    samples = value_samples(12)
    await client.begin_run()
    await client.forward_backward(samples)
    await client.forward_backward(samples, role=ROLE_CRITIC, loss=VALUE)
    await client.optim_step(role=ROLE_CRITIC, learning_rate=1e-2)
    await client.save(tmp_path / "checkpoint")  # while the policy's gradients are pending
    before = await facts(client), await client.values(samples), await client.log_probs(samples)
    trainer.stop()
    again = start_trainer(trainer.state_dir, model, num_ranks=2, settings=SETTINGS)
    again.wait_until_serving()
    trainer.process = again.process
    async with connect(trainer) as back:
        assert (await facts(back), await back.values(samples), await back.log_probs(samples)) == before
        await back.optim_step(learning_rate=0.0)
        await back.begin_run(keep_optimizer=True)
        assert await step_rates(back, samples, 2) == pytest.approx([1e-3, 0.5e-3])
