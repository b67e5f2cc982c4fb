"""`tasuki train`: checks everything, brings a node up where none runs, trains, and leaves the run's folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasuki.cli.earlier_run import EarlierRun, run_has_ended
from tasuki.cli.evidence import kept_evidence
from tasuki.cli.loop_settings import loop_settings, named_rewards
from tasuki.cli.node import running_node
from tasuki.cli.post_mortem import explained
from tasuki.cli.progress import TrainProgress
from tasuki.cli.resume import begin, go_on, resumable_run
from tasuki.cli.run_folder import MetricsFile, changeovers_of, draw_curve, summarize, write_summary
from tasuki.cli.train_inputs import TrainInputs, check_output, read_inputs
from tasuki.client.dataset import Dataset
from tasuki.client.estimation import EstimatorState
from tasuki.client.rewards import RewardPool
from tasuki.client.rl_loop import RlLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.lock import TRAINING_LOCK, StateLock
from tasuki.config.places import node_targets
from tasuki.config.schema import NodeConfig


def run(config: NodeConfig, *, config_dir: Path, may_start: bool = True, started: float | None = None) -> int:
    """Trains as the [train] table says. The reward's module is looked for in the working folder, then in `config_dir`.

    started: time.monotonic() of what the summary's seconds count from; now by default. A node that runs already is used and left
    running; one that is started here is stopped at the end, however this ends. may_start: False raises NodeDown instead of starting one.
    """
    started = time.monotonic() if started is None else started
    inputs = read_inputs(config)
    check_output(inputs.train.output_dir)
    return _run(
        config,
        inputs,
        lambda: check_output(inputs.train.output_dir),
        config_dir=config_dir,
        may_start=may_start,
        started=started,
    )


def resume(config: NodeConfig, *, config_dir: Path, may_start: bool = True) -> int:
    """Goes on with the run in the output folder, as `run` would have; begins it when there is none, and does nothing when it has ended."""
    started = time.monotonic()
    inputs = read_inputs(config)

    def look() -> EarlierRun | None:
        return resumable_run(config, inputs.train, Dataset(inputs.rows, seed=inputs.train.seed))

    earlier = look()
    if earlier is None:
        sys.stderr.write(f"there is no run in {inputs.train.output_dir} yet: it begins at step 0\n")
    elif run_has_ended(earlier, inputs.train):
        key = "num_steps" if earlier.steps[-1].step >= inputs.train.num_steps else "stop_at_eval_score"
        sys.stdout.write(f"the run in {inputs.train.output_dir} has ended; to go on, raise train.{key}\n")
        return 0
    return _run(config, inputs, look, config_dir=config_dir, may_start=may_start, started=started)


@contextmanager
def _sole_training(config: NodeConfig, output_dir: Path) -> Iterator[None]:
    """Raises NodeRunning while another `tasuki train` has the output folder or the node: neither would train what it means to."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        for folder in dict.fromkeys((output_dir.resolve(), config.state_dir.resolve())):
            locks.enter_context(StateLock.take(folder, name=TRAINING_LOCK))
        yield


def _run(
    config: NodeConfig,
    inputs: TrainInputs,
    look: Callable[[], EarlierRun | None],
    *,
    config_dir: Path,
    may_start: bool,
    started: float,
) -> int:
    """look: at the output folder, again: another `tasuki train` may have written there until it was this one's alone."""
    reward = inputs.train.reward
    with (
        RewardPool(
            named_rewards(reward),
            folders=(Path.cwd(), config_dir),
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            on_error=reward.on_error,
        ) as rewards,
        _sole_training(config, inputs.train.output_dir),
    ):
        earlier = look()
        with running_node(config, may_start=may_start), explained(config):
            _train(config, inputs, earlier, rewards, started=started)
    return 0


def _train(config: NodeConfig, inputs: TrainInputs, earlier: EarlierRun | None, rewards: RewardPool, *, started: float) -> None:
    train, target = inputs.train, node_targets(config)["coordinator"]
    with Client(target) as client, TrainProgress(target, num_steps=train.num_steps) as progress:
        num_changeovers = client.state().num_changeovers
        start = begin(client, config, train.output_dir) if earlier is None else go_on(client, config, train, earlier)
        # Only from here on what the node has done is of this run.
        with kept_evidence(config.state_dir, train.output_dir):
            metrics = MetricsFile(train.output_dir, start.steps)

            def report(step: Step) -> None:
                metrics.report(step)
                progress.report(step)

            dataset = Dataset(inputs.rows, seed=train.seed)
            start.seek(dataset, prompts_per_step=train.prompts_per_step)
            settings = loop_settings(train)
            state = EstimatorState.of(start.steps[-1].estimator if start.steps else {})
            loop = RlLoop(client, dataset, inputs.eval_rows, inputs.tokenizer, rewards, settings, state)
            loop.run(report, first_step=start.first_step)
            changeovers = changeovers_of(start.steps) + client.state().num_changeovers - num_changeovers
            policy_version = client.trainer_state().policy_version
    draw_curve(train.output_dir, metrics.steps)
    seconds = sum(step.total_seconds() for step in start.steps) + time.monotonic() - started
    summary = summarize(metrics.steps, seed=train.seed, seconds=seconds, changeovers=changeovers, policy_version=policy_version)
    write_summary(train.output_dir, summary)
    sys.stdout.write("\n".join(f"{name:<20} {value}" for name, value in summary.items()) + f"\n{train.output_dir}\n")
