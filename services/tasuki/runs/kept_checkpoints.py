"""Which checkpoints of a run are kept: the newest, the best by evaluation, and the one that the trainer's log builds on."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tasuki.client.loop_state import checkpoint_order, complete_checkpoints
from tasuki.client.step import Step
from tasuki.runs.folder import CHECKPOINTS
from tasuki.trainer.durable.training_log import read_base
from tasuki.wire.errors import TasukiError

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
