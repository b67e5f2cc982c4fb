"""Where an interrupted run resumes, and with whose weights. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.client.dataset import Dataset
from tasuki.client.loop_state import PendingStep
from tasuki.client.rl_loop import RlLoop
from tasuki.client.sft_loop import SftLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.runs.earlier_run import EarlierRun
from tasuki.runs.settings import RunSettings
from tasuki.wire.errors import InvalidArgument, VersionOrder


@dataclass(frozen=True, slots=True)
class Continuation:
    """checkpoint: to load; None if the node still has everything learned in `steps`."""

    first_step: int = 0
    steps: Sequence[Step] = ()
    checkpoint: Path | None = None
    position: Mapping[str, int] | None = None
    """Position in the dataset after `steps`; None at its start."""
    pending: PendingStep | None = None
    """The first step, if its updates have begun."""
    carried: Sequence[Mapping[str, Any]] = ()
    """Groups that the last of `steps` left unfinished."""

    def seek(self, dataset: Dataset[Any]) -> None:
        """Skips the rows that were already used."""
        if self.position is not None:
            dataset.seek(self.position)


MakeLoop = Callable[[Client, Dataset[Any], Continuation], RlLoop | SftLoop]
"""Makes the loop of a run with the state of the continuation, on an existing dataset."""


def continuation(
    earlier: EarlierRun, *, node_version: int, is_of_run: bool, pending: PendingStep | None = None
) -> Continuation:
    """Decides where to resume on a node whose trainer is at `node_version`.

    is_of_run: whether the trainer last trained this run. If so, nothing is lost; otherwise the run resumes from its newest checkpoint
    or restarts. pending: the last step whose updates began. Raises VersionOrder if the node has later weights of unknown origin.
    """
    saved, saved_version = earlier.num_saved_steps, earlier.saved_version
    # Of the checkpoint's steps, the last may have no line yet.
    by_number = {step.step: step for step in earlier.steps if step.step < saved}
    if earlier.loop is not None:
        by_number.setdefault(earlier.loop.step.step, earlier.loop.step)
    kept = [by_number[number] for number in sorted(by_number)]
    position, carried = (None, ()) if earlier.loop is None else (earlier.loop.position, earlier.loop.carried)
    if is_of_run:
        # Consecutive steps, without a final one that only evaluated.
        later = [step for step in earlier.steps if step.step >= saved]
        learned = [step for number, step in enumerate(later, start=saved) if step.step == number]
        if learned and learned[-1].is_evaluation:
            learned.pop()
        version = learned[-1].next_version() if learned else saved_version
        first = saved + len(learned)
        has_begun = pending is not None and (pending.step.step, pending.step.policy_version) == (first, version)
        if node_version == version or (has_begun and node_version > version):
            reached = learned[-1].position if learned else position
            if learned:
                carried = pending.carried if pending is not None and pending.step.step == first - 1 else ()
            return Continuation(first, [*kept, *learned], None, reached, pending if has_begun else None, carried)
    is_loadable = earlier.checkpoint is not None and node_version <= saved_version
    if is_loadable or node_version == saved_version:
        return Continuation(saved, kept, earlier.checkpoint, position, carried=carried)
    if earlier.checkpoint is None and node_version < saved_version:
        raise VersionOrder(
            f"the run began at policy version {saved_version}, whose weights the node, now at {node_version}, no longer has, and "
            "left no checkpoint: restart it with another output_dir",
            have=node_version,
            want=saved_version,
        )
    origin = f"began at {saved_version}" if earlier.checkpoint is None else f"has {saved_version} in {earlier.checkpoint}"
    raise VersionOrder(
        f"the node is at policy version {node_version}, from training other than this run, which {origin}; versions only grow: stop "
        "the node with `tasuki down CONFIG`, remove its training.log if something else starts it again, then resume",
        have=node_version,
        want=saved_version,
    )


def check_num_steps(num_done: int, settings: RunSettings) -> None:
    """Raises InvalidArgument if the run has already gone further than it is configured to."""
    if num_done > settings.num_steps:
        raise InvalidArgument(
            settings.length_key,
            f"makes {settings.num_steps} steps, but the run has done {num_done}; raise it, or start another run",
        )
