"""Where an interrupted run resumes, and with whose weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasuki.client.dataset import Dataset
from tasuki.client.step import Step
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
    num_steps_after_position: int = 0

    def seek(self, dataset: Dataset[Any], *, rows_per_step: int) -> None:
        """Skips the rows that were already used."""
        num_unknown = 0
        for step in reversed(self.steps[len(self.steps) - self.num_steps_after_position :]):
            if step.position:
                dataset.seek(step.position)
                break
            num_unknown += 1  # only its existence is known
        else:
            if self.position is not None:
                dataset.seek(self.position)
        for _ in range(num_unknown):
            dataset.next_rows(rows_per_step)


def continuation(earlier: EarlierRun, *, node_version: int, is_of_run: bool, critic_version: int | None = None) -> Continuation:
    """Decides where to resume on a node whose trainer is at `node_version` and its critic, if any, at `critic_version`.

    is_of_run: whether the trainer last trained this run. If so, nothing is lost; otherwise the run resumes from its newest checkpoint
    or restarts. Raises VersionOrder if the node has later weights of unknown origin.
    """
    saved, saved_version = earlier.num_saved_steps, earlier.saved_version
    kept = _until(earlier)
    position = None if earlier.loop is None else earlier.loop.position
    if is_of_run:
        learned = _after(earlier.steps, saved)
        version = learned[-1].next_version() if learned else saved_version
        number = saved + len(learned)
        pending = _pending(earlier, number=number, version=version, node_version=node_version, critic_version=critic_version)
        if pending is not None:
            learned = [*learned, pending]
        if node_version == version or pending is not None:
            return Continuation(saved + len(learned), [*kept, *learned], None, position, len(learned))
    is_loadable = earlier.checkpoint is not None and node_version <= saved_version
    if is_loadable or node_version == saved_version:
        return Continuation(saved, kept, earlier.checkpoint, position)
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


def _pending(earlier: EarlierRun, *, number: int, version: int, node_version: int, critic_version: int | None) -> Step | None:
    """The step in which the client died, after an optimizer step and before the step's line. Its metrics are lost."""
    known = earlier.pending if earlier.pending is not None and earlier.pending.step == number else None
    num_made, num_critic_steps = node_version - version, 0
    if known is not None and known.critic_version is not None and critic_version is not None:
        num_critic_steps = max(critic_version - known.critic_version, 0)
    if num_made < 0 or not (num_made or num_critic_steps) or (known is None and num_made > 1):
        return None
    step = Step(number) if known is None else replace(known, metrics={}, seconds={}, mean_reward=None)
    return replace(step, policy_version=version, num_policy_steps=num_made, num_critic_steps=num_critic_steps)


def _until(earlier: EarlierRun) -> list[Step]:
    """The steps of the checkpoint; the last may have no line yet."""
    found = {step.step: step for step in earlier.steps if step.step < earlier.num_saved_steps}
    if earlier.loop is not None:
        found.setdefault(earlier.loop.step.step, earlier.loop.step)
    return [found[number] for number in sorted(found)]


def _after(steps: Sequence[Step], first: int) -> list[Step]:
    """Consecutive steps from `first` on, without a final step that only evaluated."""
    later = [step for step in steps if step.step >= first]
    whole = [step for number, step in enumerate(later, start=first) if step.step == number]
    return whole[:-1] if whole and whole[-1].is_evaluation else whole
