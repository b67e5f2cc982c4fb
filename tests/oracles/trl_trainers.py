"""Real TRL trainers around a tiny model; the tests supply rollouts and model outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

GROUP_SIZE = 4
MAX_COMPLETION_TOKENS = 32


def grpo_trainer(**settings: Any) -> GRPOTrainer:
    return _trainer(GRPOTrainer, GRPOConfig, settings)


def rloo_trainer(**settings: Any) -> RLOOTrainer:
    return _trainer(RLOOTrainer, RLOOConfig, settings)


def _trainer(trainer: Callable[..., Any], config: Callable[..., Any], settings: dict[str, Any]) -> Any:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "word": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = trainer(
        model=LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_COMPLETION_TOKENS,
            **settings,
        ),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
        train_dataset=Dataset.from_list([{"prompt": "word"}] * GROUP_SIZE),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    made.args.steps_per_generation = 1
    return made


def advantages(trainer: Any, rewards_S: torch.Tensor) -> torch.Tensor:
    """Advantages [S] that the trainer computes for these rewards, NaN for a failed one, in groups of GROUP_SIZE."""
    num_samples = len(rewards_S)
    ids = [[3, 1]] * num_samples
    if isinstance(trainer, GRPOTrainer):
        trainer._generate = lambda prompts: (ids, ids, None, ["word"] * num_samples, None, {}, None, None)
    else:
        trainer._generate = lambda prompts: (ids, ids, ["word"] * num_samples)
    trainer._calculate_rewards = lambda *_: rewards_S[:, None].clone()
    return trainer._generate_and_score_completions([{"prompt": "word"} for _ in range(num_samples)])["advantages"]


def loss(
    trainer: GRPOTrainer, *, log_probs_ST: torch.Tensor, entropy_ST: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Loss that the trainer computes for a batch if the model gives these log-probs and entropies."""
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs_ST, entropy_ST, None)
    ones = torch.ones(log_probs_ST.shape, dtype=torch.long)
    inputs = {"prompt_ids": ones[:, :1], "prompt_mask": ones[:, :1], "completion_ids": ones, **inputs}
    return trainer._compute_loss(trainer.model, {"num_items_in_batch": inputs["completion_mask"].sum(), **inputs})
