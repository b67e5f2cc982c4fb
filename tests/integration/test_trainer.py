"""The trainer service of two ranks over gRPC: learning, scoring, and its reported state."""

from pathlib import Path

import pytest
import torch

from tasuki.v1 import loss_pb2, types_pb2
from tasuki.v1.types_pb2 import ROLE_REFERENCE
from tests.integration.trainer_process import TrainerClient, samples_of_now
from tests.integration.trainer_samples import plain_log_probs
from tests.refusal import refused


async def test_metrics_count_tokens_steps_and_the_gap_of_the_last_batch(client: TrainerClient) -> None:
    before = await client.metrics()
    samples = await samples_of_now(client)
    for sample in samples[:2]:
        sample.policy_version = 0
    answer = await client.forward_backward(samples)
    step = await client.optim_step(learning_rate=0.0)
    after = await client.metrics()

    def counted(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert (
        counted(
            'grpc_server_handled_total{grpc_code="OK",grpc_method="OptimStep",grpc_service="tasuki.v1.TrainerService",grpc_type="unary"}'
        )
        == 1
    )
    assert counted('tasuki_trainer_tokens_total{role="policy"}') == answer.num_tokens
    assert counted('tasuki_trainer_samples_total{role="policy"}') == len(samples)
    assert counted('tasuki_trainer_steps_total{role="policy",status="done"}') == 1
    assert counted("tasuki_sample_staleness_versions_count") == len(samples)
    assert counted("tasuki_sample_staleness_versions_sum") == 2 * (step.version - 1)
    assert after['tasuki_log_prob_gap{stat="max"}'] == pytest.approx(answer.metrics["log_prob_gap_max"])
    assert after["tasuki_policy_version"] == step.version
    # Two ranks work.
    assert counted('tasuki_gpu_seconds_total{use="forward_backward"}') >= 1.5 * answer.seconds


async def test_learning_lowers_the_loss_and_counts_versions(client: TrainerClient) -> None:
    version = (await client.state()).policy_version
    samples = await samples_of_now(client)
    first = await client.forward_backward(samples)
    assert (await client.state()).has_gradients
    step = await client.optim_step()
    assert step.version == version + 1
    assert step.learning_rate == pytest.approx(1e-3)
    assert step.grad_norm > 0
    assert not (await client.state()).has_gradients
    second = await client.forward_backward(samples)
    assert second.loss < first.loss
    assert first.num_samples == len(samples)
    assert first.metrics["log_prob_gap_max"] > first.metrics["log_prob_gap"] > 0
    # The samples are of the version before the step, so their gap says nothing about rollout.
    assert not {"log_prob_gap", "rollout_kl"} & second.metrics.keys()


async def test_log_probs_equal_those_of_transformers(client: TrainerClient, trainer_model: Path, tmp_path: Path) -> None:
    samples = await samples_of_now(client, 30)
    await client.forward_backward(samples)
    await client.optim_step()
    await client.export(tmp_path / "now")
    for index, sample in enumerate(samples):
        sample.temperature = 0.5 + 0.1 * (index % 7)
    reference = await client.log_probs(samples, ROLE_REFERENCE)
    start = plain_log_probs(trainer_model, samples, dtype=torch.float32)
    assert torch.allclose(_flat(reference), _flat(start), atol=1e-5)
    policy = await client.log_probs(samples)
    exported = plain_log_probs(tmp_path / "now", samples, dtype=torch.float32)
    # The export is rounded to the checkpoint's bfloat16; the policy's master weights are not.
    assert torch.allclose(_flat(policy), _flat(exported), atol=0.1)
    assert not torch.allclose(_flat(policy), _flat(plain_log_probs(trainer_model, samples, dtype=torch.float32)))


async def test_gap_is_the_distance_to_the_given_rollout_log_probs(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    scored = await client.log_probs(samples)
    for sample, log_probs in zip(samples, scored, strict=True):
        sample.rollout_log_probs[:] = log_probs
    answer = await client.forward_backward(samples)
    assert answer.metrics["log_prob_gap_max"] < 1e-5
    assert answer.metrics["clip_fraction"] == 0
    samples[3].rollout_log_probs[0] += 0.25
    samples[3].ClearField("loss_mask")
    await client.discard_gradients()
    assert (await client.forward_backward(samples)).metrics["log_prob_gap_max"] == pytest.approx(0.25, abs=1e-5)


async def test_the_calls_of_a_step_have_one_denominator(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    whole = await client.forward_backward(samples)
    norm = (await client.optim_step(learning_rate=0.0)).grad_norm
    for sample in samples:
        sample.policy_version += 1
    given = loss_pb2.LossConfig(name="ppo")
    given.settings["denominator"] = whole.denominator
    parts = [await client.forward_backward(part, loss=given) for part in (samples[:5], samples[5:])]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert (await refused(client.forward_backward(samples))).metadata["field"] == "header.loss.settings.denominator"
    other = loss_pb2.LossConfig(name="ppo")
    other.settings["denominator"] = whole.denominator / 2
    assert (await refused(client.forward_backward(samples, loss=other))).metadata["field"] == "header.loss.settings.denominator"
    assert (await client.optim_step(learning_rate=0.0)).grad_norm == pytest.approx(norm, rel=1e-5)
    for sample in samples:
        sample.policy_version += 1
    await client.forward_backward(samples)
    assert (await refused(client.forward_backward(samples, loss=given))).metadata["field"] == "header.loss.settings.denominator"
    await client.discard_gradients()
    await client.forward_backward(samples)


async def test_usage_is_measured_per_rank(client: TrainerClient) -> None:
    samples = await samples_of_now(client)
    await client.forward_backward(samples)
    await client.optim_step()
    await client.forward_backward(samples)
    state, usage = await client.state(), await client.usage()
    total = {tag: sum(each.total_bytes for each in usage.tags if each.tag == tag) for tag in {each.tag for each in usage.tags}}
    # Memory comes in chunks, and tensors below 2 KiB are not in the arenas.
    assert total[types_pb2.MEMORY_TAG_GRADIENTS] >= 3.5 * state.num_parameters
    assert total[types_pb2.MEMORY_TAG_OPTIMIZER] >= 7 * state.num_parameters
    assert total[types_pb2.MEMORY_TAG_WEIGHTS] >= 3.5 * state.num_parameters
    assert [(each.rank, each.device) for each in usage.devices] == [(0, "cpu"), (1, "cpu")]
    assert {each.rank for each in usage.tags} == {0, 1}


def _flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row])
