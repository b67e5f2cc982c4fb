"""Where an interrupted run resumes, and with whose weights; and how the node and the output folder are brought there."""

import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tasuki.client.dataset import Dataset
from tasuki.client.durable import write_durably
from tasuki.client.loop_state import LOOP_FILE, PendingStep, checkpoint_order, damaged_checkpoint, forget_pending, read_pending
from tasuki.client.rl_loop import RlLoop
from tasuki.client.sft_loop import SftLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import role_versions
from tasuki.config.paths import model_texts_path, training_log_path, training_output_path, training_run_path
from tasuki.config.schema import NodeConfig
from tasuki.models.config_json import read_json_object
from tasuki.models.folder_files import text_digests
from tasuki.node.node_settings import running_settings
from tasuki.runs.earlier_run import EarlierRun, RunHead, provenance, read_earlier_run, run_has_ended, write_head
from tasuki.runs.folder import CHECKPOINTS
from tasuki.runs.recipe import RunSettings, check_recipe, recipe
from tasuki.wire.errors import InvalidArgument, PathNotFound, VersionOrder
from tasuki.wire.regular_file import read_path, read_regular


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


def resumable_run(config: NodeConfig, settings: RunSettings, dataset: Dataset[Any]) -> EarlierRun | None:
    """Finds an interrupted run in the output folder, or None. Checks everything that needs no node.

    Raises InvalidArgument naming a changed key, and the errors of read_earlier_run.
    """
    earlier = read_earlier_run(settings.output_dir)
    if earlier is None:
        return None
    check_recipe(recipe(config), begun_with=earlier.head.recipe, output_dir=settings.output_dir)
    if earlier.checkpoint is not None and earlier.loop is not None:
        try:
            dataset.seek(earlier.loop.position)
        except InvalidArgument as error:
            raise damaged_checkpoint(earlier.checkpoint, f"{earlier.checkpoint / LOOP_FILE}: {error.message}") from error
    if not run_has_ended(earlier, settings):
        check_num_steps(earlier.num_saved_steps, settings)
    return earlier


def check_restart(earlier: EarlierRun, config: NodeConfig, settings: RunSettings) -> None:
    """Raises InvalidArgument for a run that would start over, and again without checkpoints, on a node that is started for it."""
    if earlier.checkpoint is None and running_settings(config) is None:
        log = training_log_path(config.state_dir)
        other_way = ", or resume the node that learned it: tasuki up CONFIG --resume" if log.exists() else ""
        _check_saves(earlier, settings, other_way=other_way)


def begin(client: Client, config: NodeConfig, settings: RunSettings, *, config_dir: Path, now: datetime) -> Continuation:
    """Starts a run from the node's current weights, without gradients that an earlier run may have left; tells of other weights than the
    model's. config_dir: for run.json. now: what chat templates read as the time.

    Raises InvalidArgument for a text of the model that has changed since the node started.
    """
    if (known := model_texts_path(config.state_dir)).is_file():
        now_there = text_digests(config.model.path)
        for name, digest in read_json_object(known, field="state_dir").items():
            if now_there.get(name) != digest:
                problem = f"{config.model.path / name} has changed since the node started; restore it, or start the node again"
                raise InvalidArgument("model.path", f"{problem}: tasuki down --state-dir {config.state_dir}")
    _discard_gradients(client)
    client.begin_run()
    forget_pending(settings.output_dir)
    version, origin = client.trainer_state().policy_version, provenance(config, config_dir=config_dir)
    if version:
        by = ""
        with suppress(OSError):
            by = f", which the run in {read_path(training_output_path(config.state_dir))} left"
        cure = f"for the model's: tasuki down --state-dir {config.state_dir}, and train again"
        sys.stderr.write(
            f"begins with the node's own weights, policy version {version}{by}, not with {config.model.path}; {cure}\n"
        )
    head = RunHead(uuid.uuid4().hex, version, recipe(config), origin, now.isoformat())
    write_head(settings.output_dir, head)
    write_durably(training_run_path(config.state_dir), head.id)
    return Continuation()


def go_on(client: Client, config: NodeConfig, settings: RunSettings, earlier: EarlierRun) -> Continuation:
    """Brings the node to where the run resumes, and removes everything later.

    Raises VersionOrder if the node has later weights of another run, InvalidArgument for a key or a damaged checkpoint.
    """
    marker = training_run_path(config.state_dir)
    is_of_run = marker.is_file() and read_regular(marker) == earlier.head.id.encode()
    pending = read_pending(settings.output_dir) if is_of_run else None
    node_version = client.trainer_state().policy_version
    found = continuation(earlier, node_version=node_version, is_of_run=is_of_run, pending=pending)
    check_num_steps(found.first_step + (found.pending is not None), settings)
    if found.pending is None:
        if not found.first_step:
            _check_saves(earlier, settings)
        _discard_gradients(client)  # ordered after commands still running on the trainer, such as an export
        if found.checkpoint is not None:
            try:
                loaded = client.load(found.checkpoint)
            except (InvalidArgument, PathNotFound) as error:
                raise damaged_checkpoint(found.checkpoint, error.message) from error
            if loaded != earlier.saved_version:
                problem = f"{found.checkpoint} has policy version {loaded}, but its {LOOP_FILE} says {earlier.saved_version}"
                raise damaged_checkpoint(found.checkpoint, problem)
        elif not found.first_step:
            client.begin_run()
        if found.checkpoint is not None or not found.first_step:
            forget_pending(settings.output_dir)
            _remove_incomplete(settings.output_dir / CHECKPOINTS, earlier)
    _make_way(settings.output_dir, earlier)
    write_durably(marker, earlier.head.id)
    if found.first_step or found.pending is not None:
        origin = found.checkpoint or f"the node's own policy version {node_version}"
        groups = found.carried if found.pending is None else found.pending.carried
        num_open = sum(list(group.get("episodes", ())).count(None) for group in groups)
        begun = f"; {num_open} open episodes begin again" if num_open else ""
        sys.stderr.write(f"resuming from {origin}: step {found.first_step} of {settings.num_steps}{begun}\n")
    else:
        sys.stderr.write(f"there is no complete checkpoint in {settings.output_dir}: restarting at step 0\n")
    return found


def _check_saves(earlier: EarlierRun, settings: RunSettings, *, other_way: str = "") -> None:
    if earlier.steps and not settings.save_every:
        raise InvalidArgument(
            f"{settings.table}.save_every",
            f"is not set, and the run in {settings.output_dir} left no checkpoint: set it to restart the run at step 0{other_way}",
        )


def _discard_gradients(client: Client) -> None:
    for role in role_versions(client.trainer_state()):
        client.discard_gradients(role=role)


def _remove_incomplete(checkpoints: Path, earlier: EarlierRun) -> None:
    """Removes checkpoints that the run will write again; the trainer also resumes from before them."""
    newest = None if earlier.checkpoint is None else checkpoint_order(earlier.checkpoint)
    for path in checkpoints.glob("version-*"):
        order = checkpoint_order(path)
        if order and order > (newest or (earlier.saved_version, -1)) and not (path / LOOP_FILE).exists():
            _remove(path)


def _remove(path: Path) -> None:
    """Removes a folder, or whatever else someone has put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _make_way(output_dir: Path, earlier: EarlierRun) -> None:
    """Removes the results of a finished run. Keeps its model under the number of its last step."""
    model, summary = output_dir / "model", output_dir / "summary.json"
    has_ended = summary.exists()
    summary.unlink(missing_ok=True)
    if not model.exists():
        return
    kept = output_dir / f"model-{earlier.steps[-1].step if earlier.steps else 0:06d}"
    if kept.exists() or not has_ended:
        _remove(model)  # of the same step, or exported by a client that then died
    else:
        model.rename(kept)
