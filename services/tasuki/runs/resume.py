"""Resumes a run on a node: restores its weights and lines, and moves later results out of the way."""

import shutil
import sys
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

from tasuki.client.dataset import Dataset
from tasuki.client.durable import write_durably
from tasuki.client.loop_state import LOOP_FILE, checkpoint_order, damaged_checkpoint, forget_pending, read_pending
from tasuki.client.sync_client import Client
from tasuki.client.types import role_versions
from tasuki.config.paths import training_log_path, training_run_path
from tasuki.config.schema import NodeConfig
from tasuki.node.node_settings import running_settings
from tasuki.runs.continuation import Continuation, check_num_steps, continuation
from tasuki.runs.earlier_run import EarlierRun, RunHead, provenance, read_earlier_run, run_has_ended, write_head
from tasuki.runs.folder import CHECKPOINTS
from tasuki.runs.recipe import check_recipe, recipe
from tasuki.runs.settings import RunSettings
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tasuki.wire.regular_file import read_regular


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
    """Starts a run from the node's current weights, without gradients that an earlier run may have left. config_dir: for run.json.
    now: what chat templates read as the time.
    """
    _discard_gradients(client)
    client.begin_run()
    forget_pending(settings.output_dir)
    version, origin = client.trainer_state().policy_version, provenance(config, config_dir=config_dir)
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
