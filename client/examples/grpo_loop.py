"""GRPO, the whole of it: evaluate, generate groups, score them, learn from the difference, hand the GPUs over, again.

`tasuki train` and `make demo` run this file (it is also importable as tasuki.client.grpo_loop). Copy it to make your own loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tasuki.client.advantages import group_advantages, has_signal
from tasuki.client.dataset import Dataset, Row
from tasuki.client.loop_state import LoopState, write_loop_state
from tasuki.client.rewards import RewardPool
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import LossConfig, Phase, PolicyKind, Sample, SamplingParams, TrainingSample


class Tokenizer(Protocol):
    def encode_prompt(self, prompt: object) -> list[int]: ...
    def decode(self, token_ids: NDArray[np.int32]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    num_steps: int
    prompts_per_step: int
    group_size: int
    max_new_tokens: int
    output_dir: Path
    loss: LossConfig
    temperature: float = 1.0
    normalize_std: bool = True
    eval_every: int | None = None
    stop_at_eval_score: float | None = None
    save_every: int | None = None


@dataclass(frozen=True, slots=True)
class Grpo:
    """One run: the node, the data, and what is asked for."""

    client: Client
    dataset: Dataset
    eval_rows: Sequence[Row]
    tokenizer: Tokenizer
    rewards: RewardPool
    settings: Settings

    def run(self, report: Callable[[Step], None], *, first_step: int = 0) -> None:
        """Trains from `first_step` on; `report` gets every step as it ends, the last one with the final evaluation only."""
        for number in range(first_step, self.settings.num_steps + 1):
            step = Step(number)
            is_last = number == self.settings.num_steps
            step.acquire(self.client, Phase.ROLLOUT)
            step.policy_version = self.client.state().policy_version
            if self.eval_rows and (is_last or number % (self.settings.eval_every or self.settings.num_steps) == 0):
                with step.timed("evaluate"):
                    step.eval_score = self.evaluate()
            target = self.settings.stop_at_eval_score
            is_last |= target is not None and step.eval_score is not None and step.eval_score >= target
            if not is_last:
                self.learn(step)
            report(step)
            if is_last:
                break
        self.client.export_model(self.settings.output_dir / "model")

    def evaluate(self) -> float:
        """Mean reward of greedy completions of the held-out prompts."""
        prompts = [self.tokenizer.encode_prompt(row["prompt"]) for row in self.eval_rows]
        greedy = SamplingParams(max_new_tokens=self.settings.max_new_tokens, temperature=0.0)
        completions = [self.tokenizer.decode(sample.token_ids) for sample in self.client.generate(prompts, greedy)]
        return float(self.rewards.score(self.eval_rows, completions).rewards.mean())

    def learn(self, step: Step) -> None:
        """One step: groups of completions, their rewards, an update of the policy where they differ, and a checkpoint when one is due."""
        settings = self.settings
        rows = self.dataset.next_rows(settings.prompts_per_step)
        prompts = [self.tokenizer.encode_prompt(row["prompt"]) for row in rows]
        sampling = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=settings.temperature)
        with step.timed("generate"):
            samples = self.client.generate(prompts, sampling, num_samples=settings.group_size)
        with step.timed("reward"):
            completions = [self.tokenizer.decode(sample.token_ids) for sample in samples]
            scores = self.rewards.score(rows, completions, group_size=settings.group_size)
        step.num_failed_rewards = scores.num_failed
        step.mean_reward = float(scores.rewards.mean())
        step.mean_num_tokens = float(np.mean([len(sample.token_ids) for sample in samples]))

        rewards_PG = scores.rewards.reshape(len(rows), settings.group_size)
        batch = self.training_samples(prompts, samples, rewards_PG)
        step.num_skipped_groups = int((~has_signal(rewards_PG)).sum())
        if batch:  # else every group agrees, and there is nothing to learn from
            self.update(step, batch)
        if settings.save_every and (step.step + 1) % settings.save_every == 0:
            self.save(step)

    def update(self, step: Step, batch: list[TrainingSample]) -> None:
        """One gradient over all samples, one optimizer step; the step then has what they measured."""
        settings = self.settings
        step.acquire(self.client, Phase.TRAIN)
        if settings.loss.kl_coef:
            with step.timed("ref_log_probs"):
                ref = self.client.compute_log_probs(batch, policy=PolicyKind.REFERENCE, temperature=settings.temperature)
            batch = [replace(sample, ref_log_probs=log_probs) for sample, log_probs in zip(batch, ref, strict=True)]
        with step.timed("forward_backward"):
            done = self.client.forward_backward(batch, replace(settings.loss, temperature=settings.temperature))
        with step.timed("optim_step"):
            stepped = self.client.optim_step()
        step.max_log_prob_gap, step.mean_log_prob_gap = done.max_log_prob_gap, done.mean_log_prob_gap
        step.clip_fraction, step.entropy, step.ref_kl = done.clip_fraction, done.entropy, done.ref_kl
        step.grad_norm, step.learning_rate = stepped.grad_norm, stepped.learning_rate

    def save(self, step: Step) -> None:
        """A checkpoint of what the step left, unless nothing was learned since the last one."""
        path = self.settings.output_dir / "checkpoints" / f"version-{step.next_version():06d}"
        if step.grad_norm is None and path.exists():
            return
        step.acquire(self.client, Phase.TRAIN)
        with step.timed("save"):
            saved = self.client.save(path)
        write_loop_state(saved.path, LoopState(step, self.dataset.position()))

    def training_samples(
        self, prompts: Sequence[list[int]], samples: Sequence[Sample], rewards_PG: NDArray[np.float32]
    ) -> list[TrainingSample]:
        """What the trainer learns from: each completion with its group's advantage, without the groups that teach nothing."""
        advantages_PG = group_advantages(rewards_PG, normalize_std=self.settings.normalize_std)
        with_signal_P = has_signal(rewards_PG)
        return [
            TrainingSample(
                prompt_token_ids=prompts[sample.prompt_index],
                completion_token_ids=sample.token_ids,
                rollout_log_probs=sample.rollout_log_probs,
                advantages=float(advantages_PG[sample.prompt_index, sample.sample_index]),
                policy_version=sample.policy_version,
            )
            for sample in samples
            if with_signal_P[sample.prompt_index] and len(sample.token_ids)
        ]
