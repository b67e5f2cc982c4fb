"""Trainers over nodes, the slower cases: adapters, a critic, experts."""

from pathlib import Path

import pytest

from tasuki.v1.types_pb2 import ROLE_CRITIC, TrainingSample
from tests.integration.fleet_trainers import fleet_of, nodes_of
from tests.integration.trainer_process import VALUE, connect, start_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

NUM_STEPS = 20
TRAINER = 'learning_rate = 1e-3\nrouter_replay = false\neps = 1e-3\nmicro_batch_tokens = 64\ncompute_dtype = "float32"\n'
COORDINATOR = "[coordinator]\nstage_timeout_s = 20\n"
LORA = '[trainer.lora]\nrank = 2\nalpha = 4\ntarget_modules = ["q_proj", "v_proj"]\n'
PISSA = LORA + 'init = "pissa"\n'
CRITIC = "[trainer.critic]\nlearning_rate = 1e-3\n"
EXPERTS = "expert_parallel = true\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(make_model("llama", seed=3), tmp_path_factory.mktemp("model"))


def samples_of(step: int, *, seed: int | None = None) -> list[TrainingSample]:
    samples = make_samples(8, vocab_size=VOCAB_SIZE, seed=step if seed is None else seed, policy_version=step)
    for sample in samples:
        sample.returns.extend([0.5] * len(sample.completion_token_ids))
    return samples


@pytest.mark.parametrize("extra", [LORA, PISSA, CRITIC, EXPERTS], ids=["lora", "pissa", "critic", "experts"])
async def test_two_nodes_of_two_ranks_learn_as_one_rank(tmp_path: Path, model: Path, extra: str) -> None:
    if extra == EXPERTS:
        model = save_checkpoint(make_model("qwen3_moe", seed=3, num_experts=6), tmp_path / "model")
    # A single rank holds all experts.
    alone = start_trainer(tmp_path / "alone", model, num_ranks=1, settings=TRAINER + extra.removeprefix(EXPERTS))
    try:
        with nodes_of(tmp_path, model, num_nodes=2, num_ranks=2, settings=TRAINER + extra + COORDINATOR) as nodes:
            alone.wait_until_serving()
            async with fleet_of(nodes, model, num_ranks=2) as fleet, connect(alone) as one:
                for step in range(NUM_STEPS):
                    samples = samples_of(step)
                    expected, got = await one.forward_backward(samples), await fleet.forward_backward(samples)
                    assert got.loss == pytest.approx(expected.loss, abs=1e-5)
                    await one.optim_step()
                    await fleet.optim_step()
                    if extra == CRITIC:
                        values = await one.forward_backward(samples, role=ROLE_CRITIC, loss=VALUE)
                        fleets = await fleet.forward_backward(samples, role=ROLE_CRITIC, loss=VALUE)
                        assert fleets.loss == pytest.approx(values.loss, abs=1e-5)
                        await one.optim_step(role=ROLE_CRITIC)
                        await fleet.optim_step(role=ROLE_CRITIC)
                scores = [await client.log_probs(samples_of(99)) for client in fleet.clients]
                assert scores[0] == scores[1]
    finally:
        alone.stop()
