"""TensorBoard, wandb, MLflow and trackio, each through its own library, imported when the tracker is opened."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tasuki.config.schema import TrackerName
from tasuki.wire.errors import NotInstalled
from tasuki.wire.extras import install_extras

_NOT_OF_MLFLOW = re.compile(r"[^/\w.\- :]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Facts about a run, sent to a tracker before its metrics."""

    id: str
    """Unchanged when the run resumes."""
    folder: Path
    """Folder for the tracker's files."""
    project: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that determine the run's results, by key."""


class Tracker(Protocol):
    """Destination of metrics. May raise any exception of its library."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Returns once everything is written or sent."""
        ...


def check_installed(name: TrackerName, *, key: str) -> None:
    """Raises NotInstalled if the library of the tracker that `key` names is missing."""
    if find_spec(package := _TRACKERS[name][0]) is None:
        raise NotInstalled(f"{key}: {name} is not installed: {install_extras(name)}", packages=package, extras=name)


def tracker_environment(folder: Path) -> dict[str, str]:
    """Defaults for variables that the libraries read. folder: for the files of all trackers."""
    return {
        "MLFLOW_TRACKING_URI": (folder / "mlflow").resolve().as_uri(),
        # MLflow requires opting in to its file store, the only one in its light package.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str((folder / "trackio").resolve()),
    }


def import_library(name: TrackerName) -> None:
    """Imports the library; takes a second or two."""
    if name == "tensorboard":
        # Otherwise it imports torch, half a GB, for tensors that we never pass.
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]  None: there is no such module
    import_module(_TRACKERS[name][0])


def open_tracker(name: TrackerName, run: TrackedRun) -> Tracker:
    run.folder.mkdir(parents=True, exist_ok=True)
    import_library(name)
    return _TRACKERS[name][1](run)


class TensorBoard:
    """Event files in the folder: `tensorboard --logdir`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter

        self._event: Any = import_module("tensorboardX.proto.event_pb2").Event
        # Another process started in the same second would otherwise overwrite this one's file. A FileWriter would write from a thread,
        # and wait for ever once that has met a full disk.
        self._writer = EventsWriter(str(run.folder / "events"), f".{os.getpid()}")
        self._scalar, self._tags = summary.scalar, dict[str, str]()
        self._message: Any = type(self._scalar("", 0.0))
        settings = "\n".join(f"    {key} = {value!r}" for key, value in sorted(run.settings.items()))
        self._write(0, summary.text("settings", settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one event for all values, which costs less than an event each."""
        entries = [self._message.Value(tag=self._tag(name), simple_value=value) for name, value in values.items()]
        self._write(step, self._message(value=entries))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, summary: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def _tag(self, name: str) -> str:
        """The name as TensorBoard takes it."""
        if name not in self._tags:
            self._tags[name] = self._scalar(name, 0.0).value[0].tag
        return self._tags[name]


class WeightsAndBiases:
    """Offline unless WANDB_MODE says otherwise; `wandb sync` uploads the folder later."""

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = import_module("wandb")

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _system_errors_of_mlflow() -> Iterator[None]:
    """Raises the OSError that MLflow wraps, such as that of a full disk."""
    exceptions: Any = import_module("mlflow.exceptions")
    try:
        yield
    except exceptions.MlflowException as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


class MlFlow:
    """Sends to MLFLOW_TRACKING_URI."""

    @_system_errors_of_mlflow()
    def __init__(self, run: TrackedRun) -> None:
        entities: Any = import_module("mlflow.entities")
        tracking: Any = import_module("mlflow.tracking")

        self._metric = entities.Metric
        self._client = tracking.MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        known = self._client.search_runs([experiment_id], f"tags.`tasuki.run` = '{run.id}'")
        if known:
            self._run_id = known[0].info.run_id
            return
        created = self._client.create_run(experiment_id, run_name=run.name, tags={"tasuki.run": run.id})
        self._run_id = created.info.run_id
        params = [entities.Param(_mlflow_name(key), str(value)[:500]) for key, value in sorted(run.settings.items())]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run_id, params=params[first : first + 100])

    @_system_errors_of_mlflow()
    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = round(1000 * time.time())
        metrics = [self._metric(_mlflow_name(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    @_system_errors_of_mlflow()
    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    """The name as MLflow takes it, which makes a path of it."""
    parts = _NOT_OF_MLFLOW.sub("_", name).split("/")
    return "/".join("_" if part.strip(".") == "" else part for part in parts)


class TrackIo:
    """A SQLite file in TRACKIO_DIR; `trackio show` displays it."""

    def __init__(self, run: TrackedRun) -> None:
        trackio: Any = import_module("trackio")

        self._library = trackio
        self._run = trackio.init(
            run.project,
            run.name,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._library.finish()


_TRACKERS: Mapping[TrackerName, tuple[str, Callable[[TrackedRun], Tracker]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MlFlow),
    "trackio": ("trackio", TrackIo),
}
"""Library and adapter of each tracker."""
