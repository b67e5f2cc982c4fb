"""A run as its output folder records it: configuration, evaluations and checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasuki.client.loop_state import checkpoint_order, complete_checkpoints
from tasuki.client.step import Step
from tasuki.config.load import load_config
from tasuki.config.paths import RUN_CONFIG, training_output_path
from tasuki.config.schema import NodeConfig
from tasuki.node.hub import with_local_files
from tasuki.runs.earlier_run import RunHead, read_head, reward_folders
from tasuki.runs.folder import CHECKPOINTS, read_steps
from tasuki.runs.recipe import file_digest
from tasuki.trainer.durable.saves import FACTS_FILE
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_path


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run, or the configuration of one that has not begun."""

    config: NodeConfig
    """Paths are absolute."""
    folders: Sequence[Path]
    """Folders where rewards are searched, besides the working directory."""
    head: RunHead | None

    @property
    def output_dir(self) -> Path:
        run = self.config.train or self.config.sft
        assert run is not None
        return run.output_dir

    def evaluated(self, *, policy_version: int | None = None) -> Step | None:
        """The last step with an evaluation, or the last of this version; None without one."""
        steps = [step for step in read_steps(self.output_dir) if evaluation_of(step)]
        return next((step for step in reversed(steps) if policy_version in (None, step.policy_version)), None)

    def checkpoint(self, given: str) -> Path:
        """A complete checkpoint, by policy version or path. Raises PathNotFound, for a version naming those that are there."""
        if not given.isdecimal():
            path = Path(given).absolute()
            if not (path / FACTS_FILE).is_file():
                raise PathNotFound(f"{path} is not a checkpoint: it has no {FACTS_FILE}", path=path)
            return path
        there = {(checkpoint_order(path) or (0,))[0]: path for path in complete_checkpoints(self.output_dir / CHECKPOINTS)}
        if int(given) not in there:
            known = f"those of versions {', '.join(map(str, there))}" if there else "no complete checkpoint"
            raise PathNotFound(f"{self.output_dir / CHECKPOINTS} has {known}, not of version {given}", path=self.output_dir)
        return there[int(given)]

    def check_data(self) -> None:
        """Raises InvalidArgument if the evaluation set has changed since the run began."""
        table, run = ("train", self.config.train) if self.config.sft is None else ("sft", self.config.sft)
        key = f"{table}.eval_dataset"
        if run is None or run.eval_dataset is None:
            raise InvalidArgument(key, "is not set: the run has no evaluation to repeat")
        recorded = None if self.head is None else self.head.recipe.get(key)
        if recorded is not None and recorded != file_digest(run.eval_dataset):
            raise InvalidArgument(
                key, f"{run.eval_dataset} has changed since the run began; restore it, or the scores say nothing"
            )


def evaluation_of(step: Step) -> dict[str, float]:
    """Figures of the step's evaluation by name: "score" of a run with rewards, "eval/loss" and others. Empty without one."""
    score = {} if step.eval_score is None else {"score": step.eval_score}
    return score | {name: value for name, value in step.metrics.items() if name.startswith("eval/")}


def find_run(place: Path, *, overrides: Sequence[str] = ()) -> RecordedRun:
    """place: a run's output folder, the state folder of the node that trained it, or its CONFIG. Raises PathNotFound, InvalidArgument."""
    if not place.is_dir():
        config = with_local_files(load_config(place, overrides=overrides))
        run = config.train or config.sft
        if run is None:
            raise InvalidArgument("train", f"{place} has neither a [train] nor an [sft] table")
        return RecordedRun(config, reward_folders(place.resolve().parent)[1:], read_head(run.output_dir))
    output_dir, head = place.resolve(), read_head(place)
    if head is None and training_output_path(place).is_file():
        output_dir = read_path(training_output_path(place))
        head = read_head(output_dir)
    if head is None or not (output_dir / RUN_CONFIG).is_file():
        raise PathNotFound(
            f"{output_dir} has no run.json or no {RUN_CONFIG}; give a run's output folder, or its CONFIG", path=place
        )
    config = load_config(output_dir / RUN_CONFIG, overrides=overrides)
    table, run = ("train", config.train) if config.sft is None else ("sft", config.sft)
    assert run is not None
    here = run.model_copy(update={"output_dir": output_dir})  # the folder may have been moved
    return RecordedRun(config.model_copy(update={table: here}), reward_folders(output_dir)[1:], head)
