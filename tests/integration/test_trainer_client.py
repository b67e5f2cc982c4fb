"""The Python client's training verbs on a trainer in float32: a call that equals another one cancels it, gradient by gradient."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tasuki.client import Aggregation, AsyncClient, Correction, LossConfig, OldPolicy, SftLoss, TrainingSample
from tasuki.client.encode import training_sample_from_proto
from tests.integration.trainer_process import CALL_TIMEOUT_S, TrainerClient, command, samples_of_now
from tests.refusal import refused

NO_CORRECTION = Correction(token_truncation=None)


def client_of(service: TrainerClient) -> AsyncClient:
    """A client whose node is a trainer alone, always in phase TRAIN."""
    client = AsyncClient("unix:/nobody")

    async def trainer() -> Any:
        return service.trainer

    async def train(give: Any, *, request_id: str | None = None) -> Any:
        return await give(command(request_id or ""), CALL_TIMEOUT_S)

    client._opened = cast(Any, SimpleNamespace(trainer=trainer, read=lambda ask: ask(), train=train))
    return client


@pytest.mark.parametrize("aggregation", list(Aggregation))
async def test_calls_with_parts_of_a_step_add_up_to_one_call(client: TrainerClient, aggregation: Aggregation) -> None:
    loss = LossConfig(aggregation=aggregation, aggregation_length=16 if aggregation is Aggregation.CONSTANT else None)
    own, samples = client_of(client), [training_sample_from_proto(one) for one in await samples_of_now(client)]
    whole = await own.forward_backward(samples, loss)
    norm = (await own.optim_step(learning_rate=0.0)).grad_norm
    parts = [await own.forward_backward(part, loss, step_samples=samples) for part in (samples[:5], samples[5:])]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5, abs=1e-7)
    negative = [replace(sample, advantages=-np.asarray(sample.advantages)) for sample in samples]
    await own.forward_backward(negative, replace(loss, denominator=whole.denominator))
    assert (await own.optim_step(learning_rate=0.0)).grad_norm < 1e-6 * norm


async def test_a_part_sent_twice_and_a_step_without_a_part_are_refused(client: TrainerClient) -> None:
    own, samples = client_of(client), [training_sample_from_proto(one) for one in await samples_of_now(client)]
    value = LossConfig(loss=SftLoss())  # of all samples, beside the parts
    await own.forward_backward(samples, value, step_samples=samples)
    await own.forward_backward(samples[:1], step_samples=samples)
    assert (await refused(own.optim_step(learning_rate=0.0))).metadata["field"] == "step_samples"
    for part in (samples[:2], [samples[1]] * 2):
        assert (await refused(own.forward_backward(part, step_samples=samples))).metadata["field"] == "header.step_places"
    await own.forward_backward(samples[1:], step_samples=samples)
    assert (await refused(own.forward_backward(samples[:1], step_samples=samples))).metadata["field"] == "header.step_samples"
    await own.optim_step(learning_rate=0.0)
    await own.forward_backward(samples, step_samples=samples)  # the next step counts from 0
    await own.discard_gradients()
    twice = [*samples, samples[0]]  # a sample of double weight
    for part in (samples, samples[:1]):
        await own.forward_backward(part, step_samples=twice)
    await own.discard_gradients()


def clipped(samples: Sequence[TrainingSample], log_probs: Sequence[Any]) -> torch.Tensor:
    """PPO's clipped surrogate, a mean over counted tokens."""
    total, count = torch.zeros(()), 0.0
    for sample, row in zip(samples, log_probs, strict=True):
        mask = torch.tensor(sample.loss_mask) if len(sample.loss_mask) else torch.ones_like(row)
        advantages, ratio = torch.tensor(sample.advantages), (row - torch.tensor(sample.old_log_probs)).exp()
        losses = -torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
        total, count = total + (mask * losses).sum(), count + float(mask.sum())
    return total / count


async def test_a_custom_loss_has_the_gradient_of_the_built_in_one(client: TrainerClient) -> None:
    own, samples = client_of(client), [training_sample_from_proto(one) for one in await samples_of_now(client)]
    numbers = np.random.default_rng(0)
    # So far from the current ones that PPO clips many of them.
    olds = [row + numbers.normal(0, 0.4, len(row)).astype(np.float32) for row in await own.compute_log_probs(samples)]
    samples = [replace(sample, old_log_probs=old) for sample, old in zip(samples, olds, strict=True)]
    loss = LossConfig(old_policy=OldPolicy.GIVEN, correction=NO_CORRECTION)
    built_in = await own.forward_backward(samples, loss)
    assert 0.1 < built_in.metrics["clip_fraction"] < 0.9
    norm = (await own.optim_step(learning_rate=0.0)).grad_norm
    await own.forward_backward(samples, replace(loss, denominator=built_in.denominator))
    custom = await own.forward_backward_custom(samples, lambda *given: -clipped(*given))
    assert -custom.loss == -custom.metrics["loss"] == pytest.approx(built_in.loss, abs=1e-6)
    assert (await own.optim_step(learning_rate=0.0)).grad_norm < 1e-6 * norm


async def test_a_custom_loss_is_refused_after_a_step_that_it_has_not_seen(client: TrainerClient) -> None:
    """Another client's step while the loss runs: its gradient would be that of other weights."""
    own, samples = client_of(client), [training_sample_from_proto(one) for one in await samples_of_now(client)]
    log_probs, version = await own.compute_log_probs(samples), (await client.state()).policy_version

    async def after_a_step(_: Any) -> Any:
        await client.forward_backward(await samples_of_now(client))
        await client.optim_step(learning_rate=0.0)
        return log_probs

    own.compute_log_probs = after_a_step
    error = await refused(own.forward_backward_custom(samples, lambda _, rows: (0.0, [0 * row.detach() for row in rows])))
    assert (error.reason, error.metadata) == ("VERSION_ORDER", {"have": str(version + 1), "want": str(version)})
    assert not (await client.state()).has_gradients
