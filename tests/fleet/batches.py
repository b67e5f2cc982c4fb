"""Batches that depend only on the step, and a tiny model to train on them, for a fleet and for a single trainer."""

import asyncio
from pathlib import Path

import numpy as np

from tasuki.client import TrainingSample
from tasuki.client.encode import training_sample_to_proto
from tests.integration.trainer_process import TrainerProcess, connect, serving_trainer
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

SETTINGS = {"learning_rate": 1e-3, "eps": 1e-3, "micro_batch_tokens": 64, "compute_dtype": "float32"}
"""Settings of [trainer]. With a large eps, another order of rounding cannot reverse a step."""


def write_node(folder: Path, *, tables: str = "") -> Path:
    """Writes the configuration of a node with a tiny model."""
    model = save_checkpoint(make_model("qwen2", seed=0), folder / "model")
    trainer = "\n".join(f"{key} = {value!r}" for key, value in SETTINGS.items())
    text = f'state_dir = "node"\n[model]\npath = "{model}"\n[rollout]\nengine.max_total_tokens = 4096\n{tables}\n'
    (folder / "node.toml").write_text(f"{text}[trainer]\n{trainer}\n")
    return folder / "node.toml"


def batch(step: int) -> list[TrainingSample]:
    draw = np.random.default_rng(step)
    lengths = draw.integers(2, 12, size=8)
    return [
        TrainingSample(
            prompt_token_ids=draw.integers(3, VOCAB_SIZE, int(draw.integers(2, 12))).tolist(),
            completion_token_ids=draw.integers(3, VOCAB_SIZE, int(length)).tolist(),
            rollout_log_probs=np.full(int(length), -4.0, dtype=np.float32),
            advantages=float(draw.normal()),
            policy_version=step,
        )
        for length in lengths
    ]


def losses_alone(folder: Path, *, num_steps: int) -> list[float]:
    """Losses of a single trainer of one rank on the model of `write_node`; the trainer is started and stopped here."""
    settings = "\n".join(f"{key} = {value!r}" for key, value in SETTINGS.items())

    async def train(trainer: TrainerProcess) -> list[float]:
        losses: list[float] = []
        async with connect(trainer) as client:
            for step in range(num_steps):
                samples = [training_sample_to_proto(sample, index=index) for index, sample in enumerate(batch(step))]
                losses.append((await client.forward_backward(samples)).loss)
                await client.optim_step()
        return losses

    with serving_trainer(folder / "alone", folder / "model", num_ranks=1, settings=settings) as trainer:
        return asyncio.run(train(trainer))
