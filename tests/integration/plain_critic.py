"""A plain critic: transformers' hidden states, a linear head, and torch's AdamW, sample by sample in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tasuki.v1.types_pb2 import TrainingSample
from tests.integration.trainer_samples import EPS, MAX_GRAD_NORM, WEIGHT_DECAY, make_samples
from tests.models import VOCAB_SIZE

VALUE_CLIP, LEARNING_RATE = 0.1, 1e-2
SETTINGS = {"learning_rate": LEARNING_RATE}
"""Of the critic; the rest is the trainer's."""
SHARED = {"eps": EPS, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM}


def add_head(folder: Path) -> None:
    """Adds a value head to a model folder; with zero weights no gradient would pass it."""
    tensors = load_file(folder / "model.safetensors")
    tensors["value_head.weight"] = torch.randn(1, 64, generator=torch.Generator().manual_seed(7)) * 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def value_samples(num_samples: int) -> list[TrainingSample]:
    """Makes samples with returns, and old values, some of them outside the clip."""
    generator = np.random.default_rng(5)
    samples = make_samples(num_samples, vocab_size=VOCAB_SIZE)
    for sample in samples:
        num_tokens = len(sample.completion_token_ids)
        sample.returns[:] = generator.normal(size=num_tokens)
        sample.values[:] = generator.normal(scale=0.2, size=num_tokens)
    return samples


class PlainCritic:
    """A critic in float32."""

    def __init__(self, folder: Path) -> None:
        causal_lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: nn.Module = causal_lm.model
        self.head = nn.Parameter(load_file(folder / "model.safetensors")["value_head.weight"].float())
        self.params = {f"model.{name}": param for name, param in self.model.named_parameters()} | {
            "value_head.weight": self.head
        }
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=LEARNING_RATE, eps=EPS, weight_decay=WEIGHT_DECAY)

    def values(self, sample: TrainingSample) -> Tensor:
        token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.completion_token_ids]])
        hidden = self.model(input_ids=token_ids).last_hidden_state[0, len(sample.prompt_token_ids) - 1 : -1]
        return hidden @ self.head[0]

    def step(self, samples: list[TrainingSample]) -> PlainCriticStep:
        """Half the squared error, clipped around the old values, averaged over counted tokens."""
        total, num_tokens = torch.zeros(()), 0.0
        for sample in samples:
            values, old, returns = self.values(sample), torch.tensor(sample.values), torch.tensor(sample.returns)
            clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
            error = torch.maximum((values - returns).square(), (clipped - returns).square())
            mask = torch.tensor(list(sample.loss_mask) or [1.0] * len(returns))
            total = total + (0.5 * error * mask).sum()
            num_tokens += float(mask.sum())
        loss = total / num_tokens
        self.optimizer.zero_grad()
        loss.backward()
        gradients = {name: param.grad.clone() for name, param in self.params.items() if param.grad is not None}
        grad_norm = nn.utils.clip_grad_norm_(self.params.values(), MAX_GRAD_NORM)
        self.optimizer.step()
        return PlainCriticStep(loss.item(), grad_norm.item(), gradients)


@dataclass(frozen=True)
class PlainCriticStep:
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
