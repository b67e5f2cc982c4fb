"""Losses on the GPU: the CPU's numbers, deterministic bits, and nothing read back from the device."""

import dataclasses

import pytest
import torch

from tasuki.algorithms.batch import LossBatch
from tasuki.algorithms.lm_head import token_log_probs
from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.objective import policy_loss

CORRECTION = Correction(token_truncation=None, sequence_truncation=1.5, token_mask=(0.5, 2.0), geometric_mask=(0.7, 1.4))
NUM_SAMPLES, LENGTH, HIDDEN_SIZE, VOCAB = 64, 50, 32, 300


def _batch() -> tuple[LossBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes a random batch, with hidden states, the vocabulary projection's weight and token ids."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = NUM_SAMPLES * LENGTH
    hidden_NH = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    weight_VH = torch.randn(VOCAB, HIDDEN_SIZE, generator=generator) * HIDDEN_SIZE**-0.5
    token_ids_N = torch.randint(VOCAB, (num_tokens,), generator=generator)
    log_probs_N = torch.log_softmax(hidden_NH @ weight_VH.T, -1)[torch.arange(num_tokens), token_ids_N]
    mask_N = (torch.rand(num_tokens, generator=generator) < 0.8).float()

    def near() -> torch.Tensor:
        return log_probs_N + 0.1 * torch.randn(num_tokens, generator=generator)

    batch = LossBatch(
        cu_seqlens_S=torch.arange(NUM_SAMPLES + 1) * LENGTH,
        weights_N=mask_N / mask_N.sum(),
        loss_mask_N=mask_N,
        is_current_N=torch.ones(num_tokens, dtype=torch.bool),
        rollout_log_probs_N=near(),
        old_log_probs_N=near(),
        advantages_N=torch.randn(num_tokens, generator=generator),
        ref_log_probs_N=near(),
    )
    return batch, hidden_NH, weight_VH, token_ids_N


def _on(device: str, batch: LossBatch) -> LossBatch:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return LossBatch(**{name: None if tensor is None else tensor.to(device) for name, tensor in fields.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [PpoLoss(), GspoLoss(clip_low=0.1, clip_high=0.1)], ids=str)
def test_losses_run_without_a_synchronization_and_repeat_to_the_bit(loss: PpoLoss | GspoLoss) -> None:
    config = LossConfig(loss=loss, old_policy=OldPolicy.GIVEN, correction=CORRECTION, kl_coef=0.1, entropy_coef=0.01)
    batch, hidden_NH, weight_VH, token_ids_N = _batch()

    def step(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        on_device, ids_N = _on(device, batch), token_ids_N.to(device)
        leaf_NH, on_device_VH = hidden_NH.to(device).requires_grad_(), weight_VH.to(device)
        temperature_N = torch.ones(len(ids_N), device=device)
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            log_probs_N, entropy_N = token_log_probs(leaf_NH, on_device_VH, ids_N, temperature_N=temperature_N)
            result = policy_loss(config, log_probs_N=log_probs_N, entropy_N=entropy_N, batch=on_device).loss
            result.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert leaf_NH.grad is not None
        return result.detach(), leaf_NH.grad

    first, second, on_cpu = step("cuda"), step("cuda"), step("cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for a, b in zip(first, on_cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-7)
