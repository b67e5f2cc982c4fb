"""Trackers of a run: their records, each exactly once, and a run that none of them can delay."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasuki.client.step import Step
from tasuki.config.schema import TrackConfig
from tasuki.coordinator.metrics_tail import MetricsTail
from tasuki.runs.earlier_run import RunHead, write_head
from tasuki.runs.folder import MetricsFile
from tasuki.trackers.sending import tracked
from tests.conftest import ENVIRONMENT, called
from tests.limits import limit_s, wait_for

NAN = float("nan")
TRACK_CALL = "import sys\nfrom tasuki.cli.__main__ import main\nsys.exit(main(sys.argv[1:]))"


def step_of(number: int) -> Step:
    metrics = {"log_prob_gap": 0.5, "reward/exact": number / 4, "broken": NAN}
    return Step(number, policy_version=number, mean_reward=number / 2, metrics=metrics, seconds={"generate": 1.5})


def run_of(folder: Path, numbers: Sequence[int]) -> Path:
    """Writes an output folder as a run leaves it."""
    folder.mkdir(exist_ok=True)
    write_head(folder, RunHead("run-1", 0, {"train.seed": 3, "trainer.betas": [0.9, 0.999]}))
    metrics = MetricsFile(folder)
    for number in numbers:
        metrics.report(step_of(number))
    return folder


def track(folder: Path, to: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tasuki.cli", "track", str(folder), "--to", to, *arguments]
    own = {**ENVIRONMENT, "HOME": str(folder), **environment}
    return subprocess.run(argv, env=own, capture_output=True, text=True, timeout=120, check=False)


def needs(name: str):
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed; `make trackers` does that")


def test_tail_gives_each_whole_line_once_and_starts_again_with_a_new_file(tmp_path: Path):
    tail = MetricsTail(tmp_path)
    assert list(tail.read()) == []
    metrics = MetricsFile(tmp_path)
    metrics.report(step_of(0))
    (first,) = tail.read()
    assert first.step == 0 and first.values == {
        "policy_version": 0, "num_policy_steps": 0, "num_critic_steps": 0, "num_failed_rewards": 0, "num_equal_groups": 0,
        "num_failed_groups": 0, "num_skipped_updates": 0, "mean_reward": 0.0, "log_prob_gap": 0.5, "reward/exact": 0.0,
        "seconds/generate": 1.5,
    }  # fmt: skip
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
        file.flush()
        assert list(tail.read()) == []
        file.write('}\nnonsense\n[]\n{"step": 99999999999999999999}\n{"step": -1}\n{"step": true}\n')
    assert [one.step for one in tail.read()] == [1]
    MetricsFile(tmp_path, [step_of(0)])  # as on a resume
    assert [one.step for one in tail.read()] == [0]


@needs("tensorboardX")
def test_tensorboard_gets_every_step_once_over_two_calls(tmp_path: Path):
    run_of(tmp_path, [0, 1])
    assert "2 steps to tensorboard, up to step 1" in track(tmp_path, "tensorboard").stderr
    run_of(tmp_path, [0, 1, 2])
    assert "1 steps to tensorboard, up to step 2" in track(tmp_path, "tensorboard").stderr
    assert scalars(tmp_path / "track/tensorboard") == {0: 0.0, 1: 0.25, 2: 0.5}
    assert "has every step, up to step 2" in called("track", tmp_path, "--to", "tensorboard").stderr
    writers = {path.name.rpartition(".")[2] for path in (tmp_path / "track/tensorboard").glob("events.*")}
    assert len(writers) == 2, "a process has a file, also in the same second"


def scalars(folder: Path) -> dict[int, float]:
    """Values of reward/exact by step, from all event files."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the format that is read here is its own

    found: dict[int, float] = {}
    for path in folder.glob("events.*"):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + length]), content[16 + length :]
            for value in event.summary.value:
                if value.tag == "reward/exact":
                    assert event.step not in found
                    found[event.step] = value.simple_value
    return found


@pytest.mark.parametrize(
    "name", [pytest.param("tensorboard", marks=needs("tensorboardX")), pytest.param("mlflow", marks=needs("mlflow"))]
)
def test_a_full_disk_is_a_typed_error_and_does_not_hang(tmp_path: Path, name: str):
    run_of(tmp_path, range(100))
    # A limit on file size makes writes fail as on a full disk.
    program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n{TRACK_CALL}"
    argv = [sys.executable, "-B", "-c", program, "track", str(tmp_path), "--to", name]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tasuki: error DISK_FULL: {tmp_path / 'track' / name}") and "cannot be written" in line


@needs("wandb")
def test_wandb_writes_an_offline_run_without_a_network(tmp_path: Path):
    done = track(
        run_of(tmp_path, [0, 1]), "wandb", "--name", "mine", http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9"
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "track/wandb").rglob("*.wandb")
    content = file.read_bytes()
    assert b"reward/exact" in content and b"trainer.betas" in content and b"mine" in content


@needs("mlflow")
def test_mlflow_gets_names_as_it_takes_them(tmp_path: Path):
    names = ["reward/<b>", "../../up", "/etc/x", "a//b", "x'y", "\ud800", "n" * 300]
    (run_of(tmp_path, []) / "metrics.jsonl").write_text(json.dumps({"step": 0, "metrics": dict.fromkeys(names, 1.0)}) + "\n")
    assert "1 steps to mlflow, up to step 0" in track(tmp_path, "mlflow").stderr
    (metrics,) = (tmp_path / "track" / "mlflow").glob("*/*/metrics")
    kept = {str(path.relative_to(metrics)) for path in metrics.rglob("*") if path.is_file()}
    assert kept == {"reward/_b_", "_/_/up", "_/etc/x", "a/_/b", "x_y"}


@needs("mlflow")
def test_mlflow_gets_settings_and_steps_into_one_run_over_two_calls(tmp_path: Path):
    tracking: Any = import_module("mlflow.tracking")

    for numbers in ([0, 1], [0, 1, 2]):
        done = track(run_of(tmp_path, numbers), "mlflow", "--project", "sums")
        assert done.returncode == 0, done.stderr
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = tracking.MlflowClient((tmp_path / "track/mlflow").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["train.seed"] == "3" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/exact")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]


@needs("trackio")
def test_trackio_gets_steps_into_its_database(tmp_path: Path):
    done = track(run_of(tmp_path, [0, 1]), "trackio", "--project", "sums")
    assert done.returncode == 0, done.stderr
    database = next((tmp_path / "track/trackio").glob("*.db"))
    assert b"reward/exact" in database.read_bytes() + b"".join(one.read_bytes() for one in database.parent.glob("*.db-wal"))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces tensorboardX by another module in child processes."""

    def put(log: str, *, close: str = "pass") -> None:
        folder = tmp_path / "library"
        folder.mkdir()
        body = f"""
        import sys, time
        from types import SimpleNamespace
        class Summary(SimpleNamespace):
            Value = SimpleNamespace
        def message(name, value): return Summary(value=[SimpleNamespace(tag=name)])
        summary = SimpleNamespace(scalar=message, text=message)
        class EventsWriter:
            def __init__(self, prefix, suffix): pass
            def write_event(self, event):
                if event.summary.value[0].tag != "settings": {log}
            def flush(self): pass
            def close(self): {close}
        sys.modules["tensorboardX.event_file_writer"] = SimpleNamespace(EventsWriter=EventsWriter)
        sys.modules["tensorboardX.proto.event_pb2"] = sys.modules["tensorboardX.proto"] = SimpleNamespace(Event=SimpleNamespace)
        """
        (folder / "tensorboardX.py").write_text(textwrap.dedent(body))
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}")

    return put


def run_beside(folder: Path, *, seconds: float = 0.0) -> float:
    """Runs a short run with a tracker. Returns the seconds of the loop."""
    folder.mkdir()
    with tracked(folder, TrackConfig(to=("tensorboard",))):
        write_head(folder, RunHead("run-1", 0, {}))
        metrics = MetricsFile(folder)
        started = time.monotonic()
        for number in range(20):
            metrics.report(step_of(number))
            time.sleep(seconds)
        return time.monotonic() - started


@needs("tensorboardX")
def test_a_run_is_followed_and_its_last_step_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    run_beside(tmp_path / "run", seconds=0.1)
    assert len(scalars(tmp_path / "run/track/tensorboard")) == 20
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("where", ["log", "close"])
def test_a_tracker_that_hangs_changes_nothing_and_is_gone_afterwards(
    tmp_path: Path, library, capfd, monkeypatch: pytest.MonkeyPatch, where: str
):
    monkeypatch.setattr("tasuki.trackers.sending._WAIT_S", 3.0)
    library("time.sleep(600)" if where == "log" else "pass", close="time.sleep(600)")
    assert run_beside(tmp_path / "run") < limit_s(1.0)
    assert "tracker tensorboard did not end within 3 s" in capfd.readouterr().err
    assert not processes_with(str(tmp_path / "run"))


def test_a_tracker_ends_when_the_run_was_killed(tmp_path: Path, library):
    library("pass", close="time.sleep(600)")
    program = f"""
    import os, time
    from pathlib import Path
    from tasuki.trackers import sending as track
    from tasuki.runs.earlier_run import RunHead, write_head
    from tasuki.trackers.sending import tracked
    from tasuki.config.schema import TrackConfig
    folder = Path({str(tmp_path / "run")!r})
    folder.mkdir()
    with tracked(folder, TrackConfig(to=("tensorboard",))):
        write_head(folder, RunHead("run-1", 0, {{}}))
        time.sleep(2)
        os.kill(os.getpid(), 9)
    """
    limited = tmp_path / "library/sitecustomize.py"
    limited.write_text("import tasuki.trackers.sending as track\ntrack.LEFT_ALONE_S = 1.0\n")
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ}, timeout=60, check=False)
    wait_for(lambda: not processes_with(str(tmp_path / "run")))


def processes_with(text: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if text.encode() in command and b"\0track\0" in command:
            found.append(command)
    return found
