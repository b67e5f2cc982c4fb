"""`tasuki train`: checks everything, brings a node up where none runs, trains by GRPO, and leaves the run's folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tasuki.cli.evidence import kept_evidence
from tasuki.cli.node import running_node
from tasuki.cli.post_mortem import explained
from tasuki.cli.progress import TrainProgress
from tasuki.cli.run_folder import MetricsFile, draw_curve, summarize, write_summary
from tasuki.cli.train_inputs import TrainInputs, read_inputs
from tasuki.client.dataset import Dataset
from tasuki.client.grpo_loop import Grpo, Settings
from tasuki.client.rewards import RewardPool
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import LossConfig
from tasuki.config.places import node_targets
from tasuki.config.schema import NodeConfig, TrainConfig


def run(config: NodeConfig, *, config_dir: Path, started: float | None = None) -> int:
    """Trains as the [train] table says. The reward's module is looked for in the working folder, then in `config_dir`.

    started: time.monotonic() of what the summary's seconds count from; now by default. A node that runs already is used and left
    running; one that is started here is stopped at the end, however this ends.
    """
    started = time.monotonic() if started is None else started
    inputs = read_inputs(config)
    reward = inputs.train.reward
    with RewardPool(
        reward.function,
        folders=(Path.cwd(), config_dir),
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
    ) as rewards:
        inputs.train.output_dir.mkdir(parents=True, exist_ok=True)
        with running_node(config), explained(config), kept_evidence(config.state_dir, inputs.train.output_dir):
            _train(config, inputs, rewards, started=started)
    return 0


def _train(config: NodeConfig, inputs: TrainInputs, rewards: RewardPool, *, started: float) -> None:
    train, target = inputs.train, node_targets(config)["coordinator"]
    metrics = MetricsFile(train.output_dir)
    with Client(target) as client, TrainProgress(target, num_steps=train.num_steps) as progress:

        def report(step: Step) -> None:
            metrics.report(step)
            progress.report(step)

        num_changeovers = client.state().num_changeovers
        dataset = Dataset(inputs.rows, seed=train.seed)
        Grpo(client, dataset, inputs.eval_rows, inputs.tokenizer, rewards, _settings(train)).run(report)
        changeovers = client.state().num_changeovers - num_changeovers
        policy_version = client.trainer_state().policy_version
    draw_curve(train.output_dir, metrics.steps)
    seconds = time.monotonic() - started
    summary = summarize(metrics.steps, seed=train.seed, seconds=seconds, changeovers=changeovers, policy_version=policy_version)
    write_summary(train.output_dir, summary)
    sys.stdout.write("\n".join(f"{name:<20} {value}" for name, value in summary.items()) + f"\n{train.output_dir}\n")


def _settings(train: TrainConfig) -> Settings:
    return Settings(
        num_steps=train.num_steps,
        prompts_per_step=train.prompts_per_step,
        group_size=train.group_size,
        max_new_tokens=train.max_new_tokens,
        output_dir=train.output_dir,
        temperature=train.temperature,
        normalize_std=train.normalize_std,
        loss=LossConfig(clip_low=train.clip_low, clip_high=train.clip_high, kl_coef=train.kl_coef),
        eval_every=train.eval_every,
        stop_at_eval_score=train.stop_at_eval_score,
        save_every=train.save_every,
    )
