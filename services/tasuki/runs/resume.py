"""Takes up a run on a node: its weights, its lines, and the way for what is to be written."""

from __future__ import annotations

import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

from tasuki.client.dataset import Dataset
from tasuki.client.durable import write_durably
from tasuki.client.loop_state import LOOP_FILE, checkpoint_order, damaged_checkpoint
from tasuki.client.sync_client import Client
from tasuki.config.places import training_run_path
from tasuki.config.schema import NodeConfig
from tasuki.runs.continuation import Continuation, check_num_steps, continuation
from tasuki.runs.earlier_run import EarlierRun, RunHead, read_earlier_run, run_has_ended, write_head
from tasuki.runs.folder import CHECKPOINTS
from tasuki.runs.recipe import check_recipe, recipe
from tasuki.runs.settings import RunSettings
from tasuki.wire.errors import InvalidArgument, PathNotFound


def resumable_run(config: NodeConfig, settings: RunSettings, dataset: Dataset[Any]) -> EarlierRun | None:
    """What was broken off in the output folder; None when nothing was begun there. Looks at everything that needs no node.

    Raises InvalidArgument naming the key that is not as it was, and what read_earlier_run raises.
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


def begin(client: Client, config: NodeConfig, settings: RunSettings) -> Continuation:
    """A new run, on the weights that the node has, without gradients that a run before it may have left there."""
    _discard_gradients(client)
    client.begin_run(keep_optimizer=settings.keep_optimizer)
    head = RunHead(uuid.uuid4().hex, client.trainer_state().policy_version, recipe(config))
    write_head(settings.output_dir, head)
    write_durably(training_run_path(config.state_dir), head.id)
    return Continuation()


def go_on(client: Client, config: NodeConfig, settings: RunSettings, earlier: EarlierRun) -> Continuation:
    """Brings the node to where the run goes on, and has everything later out of its way.

    Raises VersionOrder when the node is ahead with weights that are not the run's, InvalidArgument for a key, and what `load` raises.
    """
    marker = training_run_path(config.state_dir)
    is_of_run = marker.exists() and marker.read_text() == earlier.head.id
    if is_of_run:
        # Gradients of a step that was broken off. Comes after whatever the trainer still carries out of it, which may be its end.
        _discard_gradients(client)
    trainer = client.trainer_state()
    node_version = trainer.policy_version
    found = continuation(earlier, node_version=node_version, critic_version=trainer.critic_version, is_of_run=is_of_run)
    check_num_steps(found.first_step, settings)
    if not found.first_step and earlier.steps and not settings.save_every:
        raise InvalidArgument(
            f"{settings.table}.save_every",
            f"is not set, and the run in {settings.output_dir} left no checkpoint: set it, and the run begins at step 0 again",
        )
    if found.checkpoint is not None:
        _load(client, found.checkpoint, policy_version=earlier.saved_version)
    else:
        _discard_gradients(client)
        if not found.first_step:
            client.begin_run(keep_optimizer=settings.keep_optimizer)
    if found.num_steps_after_position == 0:
        _remove_incomplete(settings.output_dir / CHECKPOINTS, earlier)
    _make_way(settings.output_dir, earlier)
    write_durably(marker, earlier.head.id)
    if found.first_step:
        origin = found.checkpoint or f"the node's own policy version {node_version}"
        _tell(f"going on from {origin}: step {found.first_step} of {settings.num_steps}")
    else:
        _tell(f"there is no complete checkpoint in {settings.output_dir}: the run begins at step 0 again")
    return found


def _discard_gradients(client: Client) -> None:
    for role in client.trainer_state().roles:
        client.discard_gradients(role=role)


def _load(client: Client, checkpoint: Path, *, policy_version: int) -> None:
    """Raises InvalidArgument when the checkpoint is damaged, or has another version than its loop.json tells."""
    try:
        loaded = client.load(checkpoint)
    except (InvalidArgument, PathNotFound) as error:
        raise damaged_checkpoint(checkpoint, error.message) from error
    if loaded != policy_version:
        raise damaged_checkpoint(
            checkpoint, f"{checkpoint} has policy version {loaded}, its {LOOP_FILE} tells of {policy_version}"
        )


def _remove_incomplete(checkpoints: Path, earlier: EarlierRun) -> None:
    """Those that the run will write again; the trainer, too, goes on from before them."""
    newest = None if earlier.checkpoint is None else checkpoint_order(earlier.checkpoint)
    for path in checkpoints.glob("version-*"):
        order = checkpoint_order(path)
        if order and order > (newest or (earlier.saved_version, -1)) and not (path / LOOP_FILE).exists():
            shutil.rmtree(path)


def _make_way(output_dir: Path, earlier: EarlierRun) -> None:
    """For a new end of the run; the model of an earlier end is kept under the number of its step."""
    (output_dir / "summary.json").unlink(missing_ok=True)
    model = output_dir / "model"
    if not model.exists():
        return
    kept = output_dir / f"model-{earlier.steps[-1].step if earlier.steps else 0:06d}"
    if kept.exists():
        shutil.rmtree(model)  # the same step's
    else:
        model.rename(kept)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
