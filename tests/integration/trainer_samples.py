"""Samples to train on, and a plain GRPO step, sample by sample, in one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tasuki.algorithms.loss_types import Correction, LossConfig, OldPolicy
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.v1.types_pb2 import TrainingSample
from tests.vision import plain_inputs

CLIP_LOW, CLIP_HIGH, KL_COEF, TEMPERATURE = 0.2, 0.3, 0.1, 0.8
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, 0.01, 0.5
# With Adam's usual 1e-8 the first step is the gradient's sign, which rounding decides for gradients near 1e-9.
EPS = 1e-3
# Loss of `plain_step`: its ratio is against rollout, so no correction is needed.
LOSS = LossConfig(
    loss=PpoLoss(clip_low=CLIP_LOW, clip_high=CLIP_HIGH),
    kl_coef=KL_COEF,
    old_policy=OldPolicy.ROLLOUT,
    correction=Correction(token_truncation=None),
)
# Micro-batches of this size run with gradient checkpointing.
CHECKPOINTED_MAX_TOKENS = 64


def make_samples(
    num_samples: int, *, vocab_size: int, seed: int = 0, policy_version: int = 0, temperature: float = 1.0
) -> list[TrainingSample]:
    """Makes prompts and completions of many lengths, some with a mask."""
    generator = np.random.default_rng(seed)
    samples: list[TrainingSample] = []
    for index in range(num_samples):
        num_tokens = int(generator.integers(1, 12))
        rollout_log_probs = np.minimum(-4.0 + generator.normal(size=num_tokens), -1.0)
        # Every other sample has one advantage for all of its tokens.
        advantages = generator.normal(size=num_tokens if index % 2 else 1)
        samples.append(
            TrainingSample(
                prompt_token_ids=generator.integers(3, vocab_size, size=int(generator.integers(1, 12))).tolist(),
                completion_token_ids=generator.integers(3, vocab_size, size=num_tokens).tolist(),
                rollout_log_probs=rollout_log_probs.tolist(),
                advantages=advantages.tolist(),
                ref_log_probs=(rollout_log_probs + 0.1 * generator.normal(size=num_tokens)).tolist(),
                loss_mask=(generator.random(num_tokens) < 0.8).astype(float).tolist() if index % 3 == 0 else [],
                policy_version=policy_version,
                temperature=temperature,
            )
        )
    return samples


@dataclass(frozen=True)
class PlainStep:
    """Results of one plain step in one process, without our code."""

    loss: float
    entropy: float
    ref_kl: float
    clip_fraction: float
    log_prob_gap: float
    log_prob_gap_max: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def plain_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY)


def plain_step(folder: Path, samples: list[TrainingSample]) -> PlainStep:
    """Makes one clipped AdamW step in float32 by the formulas, one sample at a time."""
    return plain_step_of(_plain_model(folder, dtype=torch.float32), samples)


def plain_step_of(
    model: torch.nn.Module, samples: list[TrainingSample], *, optimizer: torch.optim.Optimizer | None = None
) -> PlainStep:
    """Makes a plain step of a float32 model, by default its first; frozen parameters stay unchanged."""
    model.zero_grad()
    rows = [_token_rows(model, sample) for sample in samples]
    log_probs, old, advantages, ref, mask, entropy = (torch.cat(parts) for parts in zip(*rows, strict=True))
    num_tokens = mask.sum()
    ratio = (log_probs - old).exp()
    surrogate, clipped = ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages
    kl = (ref - log_probs).exp() - (ref - log_probs) - 1
    loss = ((-torch.minimum(surrogate, clipped) + KL_COEF * kl) * mask).sum() / num_tokens
    loss.backward()
    named = {_short(name): param for name, param in model.named_parameters()}
    gradients = {name: param.grad.clone() for name, param in named.items() if param.requires_grad}
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    (optimizer or plain_optimizer(model)).step()
    gap = (log_probs - old).abs() * mask
    return PlainStep(
        loss=loss.item(),
        entropy=((entropy * mask).sum() / num_tokens).item(),
        ref_kl=((kl * mask).sum() / num_tokens).item(),
        clip_fraction=(((clipped < surrogate) * mask).sum() / num_tokens).item(),
        log_prob_gap=(gap.sum() / num_tokens).item(),
        log_prob_gap_max=gap.max().item(),
        grad_norm=grad_norm.item(),
        gradients=gradients,
        parameters={name: param.detach().clone() for name, param in named.items()},
    )


def _short(name: str) -> str:
    """Name in the trainer's module of a parameter of a vision model."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def plain_log_probs(folder: Path, samples: list[TrainingSample], *, dtype: torch.dtype) -> list[list[float]]:
    """Log-probs of every sample's completion at its temperature, by transformers."""
    model = _plain_model(folder, dtype=dtype)
    with torch.no_grad():
        return [_scored(model, sample)[0].tolist() for sample in samples]


def _plain_model(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a model with torch's fused attention, or with plain attention if its attention logits are capped or it has sinks."""
    config = AutoConfig.from_pretrained(folder)
    is_plain = config.model_type == "gpt_oss" or getattr(config, "attn_logit_softcapping", None) is not None
    if config.model_type in ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"):
        whole: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        whole.model.visual.requires_grad_("_tower_" in folder.name)
        return whole
    if config.model_type in ("gemma3", "gemma4"):
        text: Any = AutoModelForCausalLM.from_config(config.text_config, dtype=dtype)
        text.model.load_state_dict(
            AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).model.language_model.state_dict()
        )
        return text
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager" if is_plain else "sdpa")


def _token_rows(model: torch.nn.Module, sample: TrainingSample) -> tuple[torch.Tensor, ...]:
    log_probs, entropy = _scored(model, sample)
    num_tokens = len(sample.completion_token_ids)
    mask = list(sample.loss_mask) or [1.0] * num_tokens
    advantages = list(sample.advantages) * (num_tokens if len(sample.advantages) == 1 else 1)
    given = (list(sample.rollout_log_probs), advantages, list(sample.ref_log_probs), mask)
    old, advantages_T, ref, mask_T = (torch.tensor(values) for values in given)
    return log_probs, old, advantages_T, ref, mask_T, entropy


def _scored(model: torch.nn.Module, sample: TrainingSample) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
    logits = model(input_ids=token_ids, **plain_inputs(sample)).logits[0, len(sample.prompt_token_ids) - 1 : -1].float()
    all_log_probs = torch.log_softmax(logits / sample.temperature, dim=-1)
    log_probs = all_log_probs.gather(-1, torch.tensor(list(sample.completion_token_ids)).unsqueeze(-1)).squeeze(-1)
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1).detach()
