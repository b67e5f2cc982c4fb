"""State that an earlier life of a run left in its output folder: configuration, steps, evaluations and checkpoints."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from tasuki.client.durable import write_durably
from tasuki.client.loop_state import LoopState, checkpoint_order, complete_checkpoints, newest_checkpoint
from tasuki.client.step import Step
from tasuki.config.load import load_config
from tasuki.config.paths import RUN_CONFIG, training_output_path
from tasuki.config.schema import NodeConfig
from tasuki.models.folder_files import file_digest
from tasuki.node.model_folder import with_local_files
from tasuki.runs.folder import CHECKPOINTS, RUN_FILES, read_steps
from tasuki.runs.recipe import RunSettings, check_recipe, model_digests
from tasuki.trainer.durable.saves import FACTS_FILE
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_path, read_regular

_HEAD_FILE = "run.json"
_MAX_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class RunHead:
    """Facts recorded when a run begins."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
    policy_version: int
    """Version of its initial weights."""
    recipe: Mapping[str, Any]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where the run comes from, for people; a resumed run may differ."""
    local_time: str = ""
    """What chat templates read as the time, ISO 8601."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run that was stopped or died. loop and checkpoint: of the newest complete checkpoint, or None."""

    head: RunHead
    steps: Sequence[Step]
    checkpoint: Path | None
    loop: LoopState | None

    @property
    def num_saved_steps(self) -> int:
        return 0 if self.loop is None else self.loop.step.step + 1

    @property
    def saved_version(self) -> int:
        """Version of the newest complete checkpoint, or of the initial weights."""
        return self.head.policy_version if self.loop is None else self.loop.step.next_version()


_Head = TypeAdapter(RunHead)
_GIT_TIMEOUT_S = 5.0


def provenance(config: NodeConfig, *, config_dir: Path) -> dict[str, str]:
    """Command, its time and folder, the folder of its configuration, the data, tasuki's version, and the commit of the folder's git
    repository, if it is in one.
    """
    run = config.train or config.sft
    assert run is not None
    found = {
        "command": shlex.join(sys.argv),
        "folder": str(Path.cwd()),
        "config_dir": str(config_dir.resolve()),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "tasuki": next((found.version for found in distributions(name="tasuki")), "unknown"),  # run from a checkout
        "model": str(config.model.path),
        "dataset": str(run.dataset),
    }
    if run.eval_dataset is not None:
        found["eval_dataset"] = str(run.eval_dataset)
    if commit := _git("rev-parse", "HEAD"):
        found["commit"] = (
            f"{commit}{' with uncommitted changes' if _git('status', '--porcelain', '--untracked-files=no') else ''}"
        )
    return found


def _git(*command: str) -> str:
    """The command's output; empty without git or a repository."""
    try:
        git = ["git", "-c", "core.fsmonitor=false", *command]
        return subprocess.run(git, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def write_head(output_dir: Path, head: RunHead) -> None:
    write_durably(output_dir / _HEAD_FILE, json.dumps(asdict(head), indent=2) + "\n")


def read_earlier_run(output_dir: Path) -> EarlierRun | None:
    """Returns None if no run has begun there. Raises PathNotFound, PathPermissionDenied, or InvalidArgument naming the damaged file."""
    path = output_dir / _HEAD_FILE
    head = read_head(output_dir)
    if head is None:
        left = [name for name in (*RUN_FILES, CHECKPOINTS) if (output_dir / name).exists()]
        if not left:
            return None
        text = (
            f"{output_dir} has {left[0]} but no {_HEAD_FILE}, without which a run cannot be resumed; choose another output_dir"
        )
        raise PathNotFound(text, path=path)
    checkpoint, loop = newest_checkpoint(output_dir / CHECKPOINTS) or (None, None)
    return EarlierRun(head, read_steps(output_dir), checkpoint, loop)


def read_head(output_dir: Path) -> RunHead | None:
    """Returns None if no run has begun there. Raises PathPermissionDenied, or InvalidArgument if the file is damaged."""
    path = output_dir / _HEAD_FILE
    try:
        with named_if_denied(path, key="output_dir"):
            return _Head.validate_json(read_regular(path, max_bytes=_MAX_BYTES), strict=True)
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        text = f"{path} is damaged: {problem}; without it a run cannot be resumed, choose another output_dir"
        raise InvalidArgument("output_dir", text) from error


def reward_folders(config_dir: Path) -> Sequence[Path]:
    """Where rewards are searched: here, in the configuration's folder, and in those from which a run that is recorded there began."""
    head = read_head(config_dir)
    recorded = {} if head is None else head.provenance
    return Path.cwd(), config_dir, *(Path(recorded[name]) for name in ("folder", "config_dir") if name in recorded)


def begun_at(output_dir: Path) -> datetime | None:
    """The time that chat templates read in a run; None before it has begun. Raises as read_head."""
    head = read_head(output_dir)
    return datetime.fromisoformat(head.local_time) if head is not None and head.local_time else None


def run_has_ended(earlier: EarlierRun, settings: RunSettings) -> bool:
    """Whether the run has reached its configured end."""
    if not earlier.steps or not all((settings.output_dir / name).exists() for name in RUN_FILES):
        return False
    last = earlier.steps[-1]
    target = settings.stop_at_eval_score
    is_enough = target is not None and last.eval_score is not None and last.eval_score >= target
    return last.is_evaluation and (last.step >= settings.num_steps or is_enough)


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
        if run is None:
            raise InvalidArgument("train", "the configuration has neither a [train] nor an [sft] table")
        return run.output_dir

    def evaluated(self, *, policy_version: int | None = None) -> Step | None:
        """The last step with an evaluation, or the last of this version; None without one."""
        steps = [step for step in read_steps(self.output_dir) if evaluation_of(step)]
        return next((step for step in reversed(steps) if policy_version in (None, step.policy_version)), None)

    def checkpoint(self, given: str | None) -> Path:
        """A complete checkpoint, by policy version or path; None: the newest. Raises PathNotFound, for a version naming those there."""
        if given is not None and not given.isdecimal():
            path = Path(given).absolute()
            if not is_checkpoint(path):
                raise PathNotFound(f"{path} is not a checkpoint: it has no {FACTS_FILE}", path=path)
            return path
        there = {(checkpoint_order(path) or (0,))[0]: path for path in complete_checkpoints(self.output_dir / CHECKPOINTS)}
        version = max(there, default=0) if given is None else int(given)
        if version not in there:
            known = (
                f"those of versions {', '.join(map(str, there))}, not of version {version}"
                if there
                else "no complete checkpoint; save_every asks for some"
            )
            raise PathNotFound(f"{self.output_dir / CHECKPOINTS} has {known}", path=self.output_dir)
        return there[version]

    def check_model(self) -> None:
        """Raises InvalidArgument naming a file of the model's folder that has changed since the run began."""
        if self.head is not None:
            now = {"model.path": model_digests(self.config)}
            check_recipe(now, begun_with=self.head.recipe, output_dir=self.output_dir)

    def check_data(self) -> None:
        """Raises InvalidArgument if the evaluation set has changed since the run began."""
        table, run = ("train", self.config.train) if self.config.sft is None else ("sft", self.config.sft)
        key = f"{table}.eval_dataset"
        if run is None:
            problem = "is missing: give its dataset, eval_dataset, output_dir and reward in CONFIG, or by --set train.KEY=VALUE"
            raise InvalidArgument("train", problem)
        if run.eval_dataset is None:
            raise InvalidArgument(key, "is not set: the run has no evaluation to repeat")
        recorded = None if self.head is None else self.head.recipe.get(key)
        if recorded is not None and recorded != file_digest(run.eval_dataset):
            raise InvalidArgument(
                key, f"{run.eval_dataset} has changed since the run began; restore it, or the scores say nothing"
            )


def is_checkpoint(folder: Path) -> bool:
    return (folder / FACTS_FILE).is_file()


def evaluation_of(step: Step) -> dict[str, float]:
    """Figures of the step's evaluation by name: "score" of a run with rewards, "eval/loss" and others. Empty without one."""
    score = {} if step.eval_score is None else {"score": step.eval_score}
    return score | {name: value for name, value in step.metrics.items() if name.startswith("eval/")}


def find_run(place: Path, *, overrides: Sequence[str] = ()) -> RecordedRun:
    """place: a run's output folder, the state folder of the node that trained it, or its CONFIG. Raises PathNotFound, InvalidArgument."""
    if not place.exists():
        raise PathNotFound(f"there is no {place}; give a run's output folder, its CONFIG, or that of its node", path=place)
    if not place.is_dir():
        config = with_local_files(load_config(place, overrides=overrides))
        run = config.train or config.sft  # neither for a client's node
        return RecordedRun(config, reward_folders(place.resolve().parent)[1:], run and read_head(run.output_dir))
    output_dir, head = place.resolve(), read_head(place)
    if head is None and training_output_path(place).is_file():
        output_dir = read_path(training_output_path(place))
        head = read_head(output_dir)
    if head is None or not (output_dir / RUN_CONFIG).is_file():
        raise PathNotFound(
            f"{output_dir} has no run.json or no {RUN_CONFIG}; give a run's output folder, its CONFIG, or that of its node",
            path=place,
        )
    config = load_config(output_dir / RUN_CONFIG, overrides=overrides)
    table, run = ("train", config.train) if config.sft is None else ("sft", config.sft)
    assert run is not None
    here = run.model_copy(update={"output_dir": output_dir})  # the folder may have been moved
    return RecordedRun(config.model_copy(update={table: here}), reward_folders(output_dir)[1:], head)
