"""`tasuki eval`: repeats a run's evaluation on its exported model, another folder or a checkpoint."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tasuki.cli.progress import ProgressDisplay
from tasuki.cli.train import read_training
from tasuki.client.durable import write_durably
from tasuki.client.loop_state import LOOP_FILE, read_loop_state
from tasuki.client.progress import Progress
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import Phase
from tasuki.config.lock import NODE_LOCK, holder
from tasuki.config.paths import client_target
from tasuki.config.schema import MetricsConfig, NodeConfig, TrackConfig
from tasuki.config.train_schema import SamplesConfig
from tasuki.node.exit_report import explained
from tasuki.node.start import running_node
from tasuki.runs.earlier_run import RecordedRun, begun_at, evaluation_of, find_run, is_checkpoint
from tasuki.runs.resume import Continuation
from tasuki.wire.errors import InvalidArgument, NodeRunning, PathNotFound


def run(arguments: argparse.Namespace) -> int:
    """Evaluates on a node of its own, which it starts and stops, and writes `eval/NAME.json` to the run's folder.

    NAME is that of the weights' folder, after its parent's if it is not in the run's folder.
    Same rows, sampling, rewards and seeds as the run's last evaluation, or as that of the checkpoint's version if there was one. model: by
    default the run's `model/`. Raises NodeRunning while the run's own node is up, PathNotFound, InvalidArgument.
    """
    found = find_run(arguments.place, overrides=arguments.overrides)
    found.check_data()
    pid = holder(found.config.state_dir, name=NODE_LOCK)
    if pid is not None:
        text = f"the run's node, pid {pid}, is up; stop it first: tasuki down --state-dir {found.config.state_dir}"
        raise NodeRunning(text, state_dir=found.config.state_dir, pid=pid)
    path: Path = (arguments.model or found.output_dir / "model").absolute()
    checkpoint = str(path) if is_checkpoint(path) else arguments.checkpoint
    version, is_saved = None, checkpoint is not None
    if is_saved:
        path = found.checkpoint(checkpoint)
        found.check_model()
        # None if saved by a client.
        version = read_loop_state(path).step.next_version() if (path / LOOP_FILE).is_file() else None
    elif not path.is_dir():
        raise PathNotFound(
            f"{path} is not a folder; the run exports it at its end, --checkpoint N takes a checkpoint", path=path
        )
    recorded = found.evaluated(policy_version=version)
    step = _evaluated(found, path, is_saved=is_saved, number=(recorded or found.evaluated() or Step(0)).step)
    is_own = path.is_relative_to(found.output_dir)
    file = found.output_dir / "eval" / f"{path.name if is_own else f'{path.parent.name}-{path.name}'}.json"
    _tell(
        file,
        path,
        figures=evaluation_of(step),
        recorded=recorded,
        step=step,
        whose="the run's" if arguments.model else "recorded",
    )
    return 0


def _evaluated(found: RecordedRun, path: Path, *, is_saved: bool, number: int) -> Step:
    folder = found.output_dir / "eval"
    config = _own_node(found.config, path, is_saved=is_saved, state_dir=folder / "node")
    training, step = read_training(config, now=begun_at(found.output_dir)), Step(number)
    progress = Progress(num_steps=number)
    for place in (found.output_dir, folder):  # a CONFIG that never ran has none
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    display = ProgressDisplay(progress, config.state_dir)
    with (
        training.opened((Path.cwd(), *found.folders), save_now=lambda: False, progress=progress) as make_loop,
        display.shown(folder),
        running_node(config),
        explained(config),
        Client(client_target(config)) as client,
    ):
        if is_saved:
            client.load(path)
        step.acquire(client, Phase.TRAIN if config.train is None else Phase.ROLLOUT)
        step.policy_version = client.trainer_state().policy_version
        make_loop(client, training.dataset(), Continuation()).evaluate(step)
    return step


def _own_node(config: NodeConfig, path: Path, *, is_saved: bool, state_dir: Path) -> NodeConfig:
    """The node without ports, trackers and samples on disk. With a model's weights, which nothing rounds but rollout."""
    changes: dict[str, Any] = {
        "state_dir": state_dir,
        "listen": "unix",
        "metrics": MetricsConfig(),
        "track": TrackConfig(),
        "fleet": None,
    }
    if config.train is not None:
        changes["train"] = config.train.model_copy(update={"samples": SamplesConfig(groups_per_step=0)})
    if not is_saved:
        changes["model"] = config.model.model_copy(update={"path": path})
    if not is_saved and config.sft is None:
        # Adapters start as zeros.
        dtype = "param_dtype" if config.trainer.lora is None else "compute_dtype"
        changes["trainer"] = config.trainer.model_copy(update={dtype: config.rollout.dtype})
    return config.model_copy(update=changes)


def _tell(file: Path, path: Path, *, figures: dict[str, float], recorded: Step | None, step: Step, whose: str) -> None:
    """Prints the figures beside the recorded ones, and writes both. whose: says whether these are of the same weights."""
    if not figures.keys() - {"eval/failed_fraction"}:
        raise InvalidArgument("train.reward", "failed for every completion: there is no score")
    known = {} if recorded is None else evaluation_of(recorded)
    for name, value in figures.items():
        beside = (
            f"{whose} {known[name]:.4f}, step {recorded.step}" if recorded is not None and name in known else "not recorded"
        )
        sys.stdout.write(f"{name:<10} {value:.4f}  {beside}\n")
    result = {
        "path": str(path),
        "figures": figures,
        "recorded": known or None,
        "recorded_step": None if recorded is None else recorded.step,
        "seconds": round(step.total_seconds(), 1),
        "time": round(time.time(), 1),
    }
    write_durably(file, json.dumps(result, indent=2) + "\n")
    sys.stdout.write(f"{file}\n")
