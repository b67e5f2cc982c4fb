"""Files of a training run's output folder: metrics, checkpoints to keep, summary and curve, and the archive: copies of the node's logs
and journal for an audit, since the node's folder may serve another run next."""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from tasuki.client.durable import named_if_full, open_private, write_durably
from tasuki.client.loop_state import checkpoint_order, complete_checkpoints
from tasuki.client.step import Step
from tasuki.config import paths
from tasuki.config.choices import plan_path
from tasuki.coordinator.journal_file import open_journal
from tasuki.node.exit_report import KEPT_LOGS, rotated_paths
from tasuki.runs.recipe import RunSettings
from tasuki.trainer.durable.training_log import read_base
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import DiskFull, InvalidArgument, PathExists, TasukiError
from tasuki.wire.line_reader import LineReader
from tasuki.wire.regular_file import open_regular, read_path
from tasuki.wire.stages import HOLDS

# Files that exist once a run has begun.
RUN_FILES = ("summary.json", "metrics.jsonl", "model")
CHECKPOINTS = "checkpoints"
"""Folder of checkpoints, which also shows that a run has begun."""


SAMPLES = "samples"
"""Folder of samples written for inspection."""
EVALUATIONS = "evaluations"
"""Folder of held-out completions, one file for each evaluated step."""


class MetricsFile:
    """metrics.jsonl: one line per step, durable as soon as the step has ended."""

    def __init__(self, output_dir: Path, steps: Sequence[Step] = ()) -> None:
        """steps: of the run's earlier lives. Lines of other steps are dropped."""
        self._path = output_dir / "metrics.jsonl"
        self.steps = list(steps)
        if steps or self._path.exists():
            write_durably(self._path, "".join(_line(step) for step in steps))

    def report(self, step: Step) -> None:
        self.steps.append(step)
        with named_if_full(self._path), open_private(self._path, "a") as lines:
            lines.write(_line(step))
            lines.flush()
            os.fsync(lines.fileno())


def read_steps(output_dir: Path) -> list[Step]:
    """Reads the steps of metrics.jsonl; ignores a truncated last line. Raises PathPermissionDenied, or InvalidArgument naming an invalid
    line or file.
    """
    path = output_dir / "metrics.jsonl"
    try:
        with named_if_denied(path, key="output_dir"), open_regular(path) as file:
            return [_step(line, f"{path}:{number}") for number, line in enumerate(LineReader().lines(file), start=1)]
    except FileNotFoundError:
        return []
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}; remove it: a run can resume from a checkpoint without it"
        raise InvalidArgument("output_dir", text) from error


def _step(line: bytes, where: str) -> Step:
    try:
        return Step.of(json.loads(line))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        text = f"{where} is not a step: {error}; remove the line or the file: a run can resume from a checkpoint without it"
        raise InvalidArgument("output_dir", text) from error


def check_output(settings: RunSettings) -> None:
    """Raises PathExists if the output folder contains an earlier run."""
    output_dir = settings.output_dir
    for name in (*RUN_FILES, CHECKPOINTS):
        if (output_dir / name).exists():
            text = f"{output_dir / name} exists from an earlier run; choose another folder, or continue that run with --resume"
            raise PathExists(f"{settings.table}.output_dir: {text}", path=output_dir)


def name_run(state_dir: Path, output_dir: Path) -> None:
    """Records for dashboards where the node's run writes its files. On a full disk the run continues unseen."""
    with suppress(OSError, DiskFull):
        write_durably(paths.training_output_path(state_dir), f"{output_dir.resolve()}\n")


def changeovers_of(steps: Sequence[Step]) -> int:
    """Number of phase changes in these steps."""
    return sum(stage in step.stage_seconds for step in steps for stage in HOLDS.values())


def summarize(steps: Sequence[Step], *, seed: int, seconds: float, changeovers: int, policy_version: int) -> dict[str, object]:
    """Summarizes the run. eval_score_* are mean rewards over the held-out prompts, or None."""
    scores = [step.eval_score for step in steps if step.eval_score is not None]
    before, after = (scores[0], scores[-1]) if scores else (None, None)
    rewards = [step.mean_reward for step in steps if step.mean_reward is not None]
    gaps = [step.metrics["log_prob_gap_max"] for step in steps if "log_prob_gap_max" in step.metrics]
    return {
        "eval_score_before": before,
        "eval_score_after": after,
        "mean_reward_last": rewards[-1] if rewards else None,
        "seconds": round(seconds, 1),
        "steps": sum(not step.is_evaluation for step in steps),
        "steps_without_update": sum(bool(step.why_no_update) for step in steps),
        "changeovers": changeovers,
        "log_prob_gap_max": max(gaps, default=None),
        "num_failed_rewards": sum(step.num_failed_rewards for step in steps),
        "seed": seed,
        "policy_version": policy_version,
    }


def write_summary(output_dir: Path, summary: dict[str, object]) -> None:
    write_durably(output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


Curve = tuple[str, str, str, Callable[[Step], float | None]]
"""Label, color, marker, and the value of a step."""


def draw_curves(
    output_dir: Path, steps: Sequence[Step], *panels: tuple[str, Sequence[Curve]], scale: Literal["linear", "log"] = "linear"
) -> None:
    """Draws curve.png, readable by its owner alone: two panels of named curves by step. scale: of the lower one."""
    from matplotlib.figure import Figure  # takes half a second to import; no other command draws

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for axes, (name, curves) in zip((upper, lower), panels, strict=True):
        for label, color, marker, value_of in curves:
            known = [(step.step, value) for step in steps if (value := value_of(step)) is not None]
            if known:
                axes.plot(*zip(*known, strict=True), label=label, color=color, marker=marker, markersize=4)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    lower.set_yscale(scale)
    lower.set_xlabel("step")
    aside = output_dir / ".curve.partial"
    aside.unlink(missing_ok=True)
    with open_private(aside, "wb") as file:
        figure.savefig(file, dpi=120, format="png")
    aside.replace(output_dir / "curve.png")


def _line(step: Step) -> str:
    return json.dumps(asdict(step)) + "\n"


_REMOVED = ".removed"


def best_checkpoint(output_dir: Path, steps: Sequence[Step]) -> tuple[Path, Step] | None:
    """The complete checkpoint whose version had the best evaluation, the newer of equals, with that evaluation; None if none had any."""
    evaluated = {step.policy_version: step for step in steps if _goodness(step) is not None}
    found = [
        (path, step)
        for path in complete_checkpoints(output_dir / CHECKPOINTS)
        if (step := evaluated.get((checkpoint_order(path) or (None,))[0])) is not None
    ]
    return max(found, key=lambda each: (_goodness(each[1]), checkpoint_order(each[0])), default=None)


def remove_checkpoints(output_dir: Path, steps: Sequence[Step], *, keep_last: int, log: Path) -> None:
    """Removes the other complete checkpoints. One is renamed first, so that none is ever complete in part.

    log: of the trainer, which needs a checkpoint until it has shortened its log. What cannot be removed is told and tried again.
    """
    folder = output_dir / CHECKPOINTS
    best = best_checkpoint(output_dir, steps)
    try:
        kept = {read_base(log), None if best is None else best[0].resolve()}
        for path in complete_checkpoints(folder)[:-keep_last]:
            if path.resolve() not in kept:
                path.rename(path.with_name(f".{path.name}{_REMOVED}"))
        for path in folder.glob(f".version-*{_REMOVED}"):
            shutil.rmtree(path)
    except (OSError, TasukiError) as error:
        sys.stderr.write(f"tasuki: old checkpoints in {folder} cannot be removed: {error}\n")


def _goodness(step: Step) -> float | None:
    """The step's held-out score, or loss with its sign turned; None without an evaluation."""
    loss = step.metrics.get("eval/loss")
    return step.eval_score if loss is None else -loss


_PROCESSES = ("coordinator", "trainer", "rollout", "supervisor")
NODE_FILE = "state_dir"


@contextmanager
def archived(state_dir: Path, output_dir: Path) -> Iterator[None]:
    """Copies the node's logs and journal when the block ends. Files that cannot be copied are reported, not raised.

    Until then, or if this process is killed, `archive_folder` of the output folder is the node's.
    """
    node_file = output_dir / NODE_FILE
    if output_dir.resolve() != state_dir.resolve():
        output_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(node_file, f"{state_dir.resolve()}\n")
    try:
        yield
    finally:
        try:
            if output_dir.resolve() != state_dir.resolve():
                _copy_all(state_dir, output_dir)
            node_file.unlink(missing_ok=True)
        except (OSError, sqlite3.Error) as error:
            sys.stderr.write(f"tasuki: some files for an audit could not be copied to {output_dir}: {error}\n")


def archive_folder(folder: Path) -> Path:
    """Folder with the archive of the run in `folder`: the node's until the run has a copy, then `folder` itself.

    Raises OSError if the file that names the node cannot be read.
    """
    try:
        state_dir = read_path(folder / NODE_FILE)
        return state_dir if paths.journal_path(state_dir).is_file() else folder
    except FileNotFoundError:
        return folder


def _copy_all(state_dir: Path, output_dir: Path) -> None:
    """Copies the journal last, so that it contains every command that the services logged."""
    for process in _PROCESSES:
        target = paths.log_path(output_dir, process)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        source = paths.log_path(state_dir, process)
        pairs = zip(rotated_paths(source, keep=KEPT_LOGS), rotated_paths(target, keep=KEPT_LOGS), strict=True)
        for there, here in ((source, target), *pairs):
            _copy(there, here)
    _copy(paths.training_log_path(state_dir), paths.training_log_path(output_dir))
    _copy(paths.memory_record_path(state_dir), paths.memory_record_path(output_dir))
    _copy(paths.config_path(state_dir), paths.archived_config_path(output_dir))
    _copy(plan_path(state_dir), plan_path(paths.archived_config_path(output_dir).parent))
    if paths.fleet_journal_path(state_dir).is_file():
        _copy_journal(paths.fleet_journal_path(state_dir), paths.fleet_journal_path(output_dir))
    else:
        paths.fleet_journal_path(output_dir).unlink(missing_ok=True)
    _copy_journal(paths.journal_path(state_dir), paths.journal_path(output_dir))


def _copy(source: Path, target: Path) -> None:
    """Copies a file. If there is none, removes the target, which belongs to an earlier run."""
    target.unlink(missing_ok=True)
    if source.exists():
        _touch(target)
        shutil.copyfile(source, target)


def _touch(path: Path) -> None:
    """Creates a file for this user alone, as in the node's folder, whatever the umask: logs may hold prompts and completions."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _copy_journal(source: Path, target: Path) -> None:
    """Copies the journal consistently, even while it is written."""
    target.unlink(missing_ok=True)
    _touch(target)
    with open_journal(source) as journal, closing(sqlite3.connect(target)) as copy:
        journal.backup(copy)
