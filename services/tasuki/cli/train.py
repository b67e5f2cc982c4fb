"""`tasuki train`: validates everything, starts a node if none runs, trains, and writes the run's folder."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

from tasuki.cli.config import warn_of_doubts
from tasuki.cli.progress import ProgressDisplay
from tasuki.client.loop_state import forget_pending, read_pending
from tasuki.client.progress import Progress
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.environment import otlp_endpoint, otlp_headers_file
from tasuki.config.load import save_config
from tasuki.config.lock import NODE_LOCK, TRAINING_LOCK, StateLock, holder
from tasuki.config.paths import RUN_CONFIG, client_target, training_log_path
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.metrics_tail import METRICS
from tasuki.node.exit_report import explained
from tasuki.node.node_settings import adopt_node
from tasuki.node.processes import continue_children
from tasuki.node.start import check_run, check_state_folder, running_node
from tasuki.rpc.logs import check_telemetry
from tasuki.runs.earlier_run import EarlierRun, begun_at, reward_folders, run_has_ended
from tasuki.runs.folder import (
    MetricsFile,
    archived,
    best_checkpoint,
    changeovers_of,
    check_output,
    name_run,
    remove_checkpoints,
    write_summary,
)
from tasuki.runs.progress import duration
from tasuki.runs.resume import MakeLoop, begin, check_restart, go_on, resumable_run
from tasuki.runs.rl_training import RlTraining, open_rewards, read_rl
from tasuki.runs.sft_training import SftTraining, read_sft
from tasuki.trackers.adapters import check_installed
from tasuki.trackers.sending import tracked
from tasuki.wire.errors import InvalidArgument, NodeDown, NodeRunning, ServiceFailed

Training = RlTraining | SftTraining
"""A run with validated configuration and files."""


class SaveRequest:
    """Set by SIGUSR1, which a scheduler sends before it takes the machine away.

    The current step is finished and saved, and the run ends. `tasuki train --resume` continues it.
    """

    def __init__(self) -> None:
        self._is_made = False
        self.is_met = False
        """Whether a loop has since seen the request and saved."""

    def install(self) -> None:
        """Installs the signal handler; call it from the main thread."""
        signal.signal(signal.SIGUSR1, self._make)

    def save_now(self) -> bool:
        """Whether to save the step that was just trained."""
        self.is_met = self._is_made
        return self.is_met

    def end_if_met(self) -> None:
        """Raises KeyboardInterrupt, which ends the command like Ctrl-C."""
        if self.is_met:
            raise KeyboardInterrupt

    def _make(self, number: int, frame: FrameType | None) -> None:
        self._is_made = True


def read_training(config: NodeConfig, *, now: datetime | None = None) -> Training:
    """Reads the run from [train] or [sft]. now: as of ModelTokenizer.

    Raises InvalidArgument or PathNotFound, naming the key, the file and the line.
    """
    if config.sft is not None:
        return read_sft(config, config.sft, now=now)
    return read_rl(config, now=now)


def check_data(config: NodeConfig, *, config_dir: Path) -> None:
    """Judges the run's rewards and every row of its datasets, if there are any, and tells rows to train and doubts. Raises as `run`."""
    doubts: Sequence[str] = ()
    if config.train is not None or config.sft is not None:
        training = read_training(config)
        if isinstance(training, RlTraining):
            open_rewards(training.train, reward_folders(config_dir), training.rows, training.eval_rows).close()
        num_rows = training.dataset().position()["num_rows"]
        sys.stderr.write(f"{training.settings.table}.dataset has {num_rows:,} rows that can be trained\n")
        doubts = training.doubts
    warn_of_doubts(config, doubts)


def run(config: NodeConfig, *, config_dir: Path, may_start: bool = True, started: float | None = None) -> int:
    """Trains as set in the [train] or [sft] table. The reward's module is searched in the working directory, then in `config_dir`.

    started: time.monotonic() from which the summary counts seconds; now by default. may_start: False raises NodeDown instead of starting
    a node. A node that is already running is used and left running, with its own settings where `config` has none; InvalidArgument names
    a key that differs. A node started here is always stopped at the end.
    """
    started = time.monotonic() if started is None else started
    config = _adopted(config)
    training = read_training(config)
    warn_of_doubts(config, training.doubts)
    output_dir = training.settings.output_dir
    if (pid := holder(output_dir, name=TRAINING_LOCK)) is not None:  # whose files would look like an earlier run's
        raise NodeRunning(f"pid {pid} already runs a training on {output_dir}", state_dir=output_dir, pid=pid)

    def look() -> None:
        check_output(training.settings)

    look()
    return _run(config, training, look, config_dir=config_dir, may_start=may_start, started=started)


def resume(config: NodeConfig, *, config_dir: Path, may_start: bool = True) -> int:
    """Resumes the run in the output folder as `run` would; starts it if there is none, and does nothing if it has finished."""
    started = time.monotonic()
    config = _adopted(config)
    table = config.train or config.sft
    training = read_training(config, now=table and begun_at(table.output_dir))
    warn_of_doubts(config, training.doubts)
    settings = training.settings

    def look() -> EarlierRun | None:
        return resumable_run(config, settings, training.dataset())

    earlier = look()
    if earlier is None:
        sys.stderr.write(f"there is no run in {settings.output_dir} yet; starting at step 0\n")
    elif run_has_ended(earlier, settings):
        key = settings.length_key if earlier.steps[-1].step >= settings.num_steps else f"{settings.table}.stop_at_eval_score"
        sys.stdout.write(f"the run in {settings.output_dir} has finished; to continue, raise {key}\n")
        return 0
    if earlier is not None and may_start:
        check_restart(earlier, config, settings)
    return _run(config, training, look, config_dir=config_dir, may_start=may_start, started=started)


def _adopted(config: NodeConfig) -> NodeConfig:
    """The configuration beside a running node's. Raises NotInstalled without a tracker's library, and as what it calls."""
    config = adopt_node(config)
    check_run(config)
    check_telemetry()
    for name in config.track.to:
        check_installed(name, key="track.to")
    return config


def _run(
    config: NodeConfig,
    training: Training,
    look: Callable[[], EarlierRun | None],
    *,
    config_dir: Path,
    may_start: bool,
    started: float,
) -> int:
    """look: reads the output folder once it is locked, since another `tasuki train` may have written there before.

    Raises NodeRunning while another one uses the output folder or the node, since each would disturb the other.
    """
    if may_start:
        check_state_folder(config)
    request = SaveRequest()
    request.install()
    folders, output_dir = reward_folders(config_dir), training.settings.output_dir
    progress = Progress(num_steps=training.settings.num_steps, eval_every=training.eval_every)
    locked = {Path(os.path.realpath(output_dir)): f"{training.settings.table}.output_dir"}
    locked |= {Path(os.path.realpath(config.state_dir)): "state_dir"}
    with ExitStack() as stack:
        make_loop = stack.enter_context(training.opened(folders, save_now=request.save_now, progress=progress))
        for folder, key in locked.items():
            stack.enter_context(StateLock.take(folder, name=TRAINING_LOCK, key=key))
        earlier = look()
        display = ProgressDisplay(progress, config.state_dir)
        stack.enter_context(display.shown(output_dir))
        stack.enter_context(tracked(output_dir, config.track))
        stack.enter_context(running_node(config, may_start=may_start))
        stack.enter_context(explained(config))
        try:
            lines = StepLines(progress, display, may_end_early=training.settings.stop_at_eval_score is not None)
            _train(config, training, make_loop, earlier, request, lines, config_dir=config_dir, started=started)
        finally:
            progress.begin(progress.record().step, "stop")
    continue_children()
    return 0


@contextmanager
def told_how_to_continue(config: NodeConfig, given: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Adds the commands that continue the run to an interruption or failure after a step. given: CONFIG or a run's folder."""
    try:
        yield
    except (KeyboardInterrupt, NodeDown, ServiceFailed):
        settings = config.train or config.sft
        if settings and (settings.output_dir / METRICS).exists():
            sys.stderr.write(f"{how_to_continue(config, given, overrides)}\n")
        raise


def how_to_continue(config: NodeConfig, given: Path, overrides: Sequence[str]) -> str:
    """Commands that continue an interrupted run without the loss of a step. overrides: A.B=VALUE each, of --set."""
    run = config.train if config.sft is None else config.sft
    file = given if run is None or not given.is_dir() else run.output_dir / "run.toml"
    words = [*(word for override in overrides for word in ("--set", override)), "--resume"]
    is_up = holder(config.state_dir, name=NODE_LOCK) is not None
    node = "" if is_up else f"tasuki {shlex.join(['up', str(file), *words])}, then "
    return f"nothing is lost; to continue: {node}tasuki {shlex.join(['train', str(given), *words])}"


def check_longest_sample(num_tokens: int, *, limit: int) -> None:
    """Raises InvalidArgument if a sample may have more tokens than the node's micro-batch, which the planner may have chosen."""
    if num_tokens > limit:
        problem = f"is {limit} on this node, but a sample of this run may have {num_tokens} tokens; raise it to that, or shorten samples"
        raise InvalidArgument("trainer.micro_batch_tokens", problem, num_tokens=num_tokens, limit=limit)


def _train(
    config: NodeConfig,
    training: Training,
    make_loop: MakeLoop,
    earlier: EarlierRun | None,
    request: SaveRequest,
    lines: "StepLines",
    *,
    config_dir: Path,
    started: float,
) -> None:
    settings, target = training.settings, client_target(config)
    with Client(target, otlp_endpoint=otlp_endpoint(), otlp_headers_file=otlp_headers_file()) as client:
        check_longest_sample(training.longest_sample, limit=client.trainer_state().micro_batch_tokens)
        num_changeovers = client.state().num_changeovers
        start = (
            begin(client, config, settings, config_dir=config_dir, now=training.now)
            if earlier is None
            else go_on(client, config, settings, earlier)
        )
        save_config(config, settings.output_dir / RUN_CONFIG)
        name_run(config.state_dir, settings.output_dir)
        # From here on the node's records belong to this run.
        with archived(config.state_dir, settings.output_dir):
            metrics = MetricsFile(settings.output_dir, start.steps)
            for step in start.steps:
                lines.progress.finished(step)

            def report(step: Step) -> None:
                metrics.report(step)
                if "save" in step.seconds:
                    log = training_log_path(config.state_dir)
                    remove_checkpoints(settings.output_dir, metrics.steps, keep_last=settings.keep_last, log=log)
                lines.report(step)
                request.end_if_met()

            dataset = training.dataset()
            start.seek(dataset)
            make_loop(client, dataset, start).run(report, first_step=start.first_step, pending=start.pending)
            changeovers = changeovers_of(start.steps) + client.state().num_changeovers - num_changeovers
            version = client.trainer_state().policy_version
    training.draw(settings.output_dir, metrics.steps)
    seconds = sum(step.total_seconds() for step in start.steps) + time.monotonic() - started
    summary = training.summarize(
        metrics.steps, seed=config.seed, seconds=seconds, changeovers=changeovers, policy_version=version
    )
    if best := best_checkpoint(settings.output_dir, metrics.steps):
        summary |= {"best_checkpoint": best[0].name, "best_checkpoint_step": best[1].step}
    write_summary(settings.output_dir, summary)
    pending = read_pending(settings.output_dir)
    if pending is not None and not pending.carried:  # what is carried, a longer run continues
        forget_pending(settings.output_dir)
    table = [f"{name:<20} {value}" for name, value in summary.items() if value is not None]
    lines.display.write("\n".join([*table, str(settings.output_dir)]))


_SHOWN = (
    ("eval/loss", "held-out loss", ".4f"),
    ("eval/failed_fraction", "held-out rewards failed", ".0%"),
    ("signal_fraction", "signal", ".2f"),
    ("log_prob_gap_max", "gap", ".1e"),
    ("router_disagreement", "other experts", ".1%"),
    ("explained_variance", "explained", ".2f"),
)
"""Metrics in a step's line: name, label, format."""
INEXACT = (
    "warning: train.top_p or train.top_k filters tokens, but log-probs cover all tokens: importance ratios are biased; "
    "remove both keys to avoid this"
)
"""Printed once per run; the metric inexact_fraction has the amount."""
_STALLED_STEPS = 3
"""Consecutive steps without an update after which a run is warned of, once."""
STALLED = (
    "the model does not learn from prompts whose completions all get the same reward: read some samples (tasuki dashboard), "
    "give partial credit in the reward, use easier or harder prompts, a larger group_size or temperature, or fine-tune first ([sft])"
)

FAILED = "read why rewards failed: tasuki dashboard, or `failure` in samples/"


class StepLines:
    """Prints steps as they are reported."""

    def __init__(self, progress: Progress, display: ProgressDisplay, *, may_end_early: bool = False) -> None:
        self.progress, self.display = progress, display
        self._at_most = "at most " if may_end_early else ""
        self._has_warned = False
        self._num_stalled = 0

    def report(self, step: Step) -> None:
        if step.metrics.get("inexact_fraction") and not self._has_warned:
            self._has_warned = True
            self.display.write(INEXACT, is_warning=True)
        self.progress.finished(step)
        if line := step_line(step):
            eta_s = None if step.is_evaluation else self.progress.record().eta_s  # a score may end a run early
            self.display.write(f"{line}  {self._at_most}{duration(eta_s)} left" if eta_s else line)
        if not step.is_evaluation:
            self._num_stalled = self._num_stalled + 1 if step.why_no_update else 0
            if self._num_stalled == _STALLED_STEPS:
                text = f"WARNING: {_STALLED_STEPS} steps without an update: {step.why_no_update}"
                text += f"\n{FAILED}" if step.num_failed_rewards else ""
                text += f"\n{STALLED}" if not step.num_failed_rewards or step.num_equal_groups > step.num_failed_groups else ""
                self.display.write(text, is_warning=True)


def step_line(step: Step) -> str:
    """Formats a step as one line, leaving out parts that did not run. Empty if none did: after the last step without a held-out set."""
    parts: list[str] = []
    if step.mean_reward is not None:
        parts.append(f"reward {step.mean_reward:.3f}")
    elif "loss" in step.metrics:
        parts.append(f"loss {step.metrics['loss']:.4f}")
    if step.eval_score is not None:
        parts.append(f"held-out {step.eval_score:.3f}")
    for name, label, form in _SHOWN:
        if name in step.metrics:
            parts.append(f"{label} {step.metrics[name]:{form}}")
    if step.num_failed_rewards:
        parts.append(f"{step.num_failed_rewards} rewards failed: see samples/")
    if step.num_skipped_updates:
        parts.append(f"{step.num_skipped_updates} updates skipped, gradients not finite")
    if step.why_no_update:
        parts.append(f"no update: {step.why_no_update}")
    line = [f"step {step.step:>3}", f"version {step.policy_version}", *parts, f"{step.total_seconds():.1f} s"]
    return "  ".join(line) if parts else ""
