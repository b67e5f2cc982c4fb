"""Fixtures of every test tier: GPU tests are skipped without a GPU, and one running node serves all tests that need one."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.extent import is_long, is_over

if "PYTEST_XDIST_WORKER" in os.environ:
    # Set before torch is imported: threads spin more than they compute on tiny products, and every core already has a worker.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
PYTHON_PATH = [*(str(ROOT / folder) for folder in ("protos", "services", "client")), os.environ.get("PYTHONPATH", "")]
# Nodes of tests accept failpoints.
os.environ.setdefault("TASUKI_FAILPOINTS", "")
API_KEY = "7d1c09aa5be24f31"
_SECRETS = {
    "WANDB_API_KEY": API_KEY,
    "MYSQL_PWD": API_KEY,
    "RESULTS_AT": f"postgresql://me:{API_KEY}@localhost/results",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {API_KEY}",
}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PYTHON_PATH)), **_SECRETS}

NOTHING_STAYS: Mapping[str, object] = {"trainer": [], "rollout": []}
_MODELS = threading.Lock()
"""Serializes model creation: all models come from torch's one generator, so parallel starts would change the weights."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves long files unread where they are left out: each worker would import them."""
    is_left_out = config.option.markexpr == "not long" and is_long(collection_path.relative_to(ROOT).as_posix())
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # takes seconds, so only if a test needs it

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_runtest_setup() -> None:
    if is_over():
        pytest.skip("no time left of TASUKI_PROOF_MINUTES")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes everything that collection imported, so that the garbage collector never scans it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.workers import FilesOverWorkers  # only if the plugin is installed

    return FilesOverWorkers(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops a group's services with the group: cores and memory are scarce beside another worker's services."""
    if "PYTEST_XDIST_WORKER" not in os.environ or nextitem is None:
        return
    from tests.workers import group_of

    if group_of(item.nodeid) != group_of(nextitem.nodeid):
        item.session._setupstate.teardown_exact(None)  # pytest has no public name for this


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A node started by `tasuki up`."""

    config: Path
    state_dir: Path
    model: Path
    up: subprocess.Popen[bytes]
    """Runs the command in the foreground until the node ends."""


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command line in this process."""
    from tasuki.cli.__main__ import main

    argv, out, err = [*map(str, arguments)], StringIO(), StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(argv)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def tasuki(*arguments: str | Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command line in a process and waits for it."""
    return subprocess.run(
        [sys.executable, "-m", "tasuki.cli", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def assert_clean_audit(state_dir: Path) -> str:
    """Checks that `tasuki audit` finds nothing, and returns its output."""
    audited = called("audit", state_dir)
    assert (audited.returncode, audited.stdout.splitlines()[0]) == (0, "clean"), audited.stdout
    return audited.stdout


@pytest.fixture(scope="session")
def node() -> Iterator[RunningNode]:
    """A whole node on a tiny model: coordinator, a trainer of two ranks, rollout. A test acquires the phase it needs."""
    with started_node() as started:
        yield started


@contextmanager
def started_node(
    *, tables: str = "", overrides: Sequence[str] = (), choices: Mapping[str, object] = NOTHING_STAYS, **sizes: int
) -> Iterator[RunningNode]:
    """Starts a node with `tasuki up`. tables: further tables of the configuration. overrides: such as "a.b=c".

    choices: replace the planner's; by default everything leaves at each changeover. sizes: changes to the model's sizes.
    """
    from tests.models import make_model, save_checkpoint  # takes seconds, so only if a test needs it

    # Not pytest's own folder: the path of a unix socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))
    with _MODELS:
        model = save_checkpoint(make_model("qwen2", seed=0, **sizes), folder / "model")
    config, state_dir = folder / "node.toml", folder / "node"
    config.write_text(
        f"""
        state_dir = "{state_dir}"
        [restart]
        max_restarts = 1000
        [coordinator]
        stage_timeout_s = 240
        [model]
        path = "{model}"
        [trainer]
        num_ranks = 2
        [rollout]
        engine.max_total_tokens = 4096
        {tables}
        """
    )
    settings = [part for override in overrides for part in ("--set", override)]
    argv = [sys.executable, "-m", "tests.up", "up", str(config), "--foreground", *settings]
    log = folder / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen(argv, env={**ENVIRONMENT, "CHOICES": json.dumps(choices)}, stderr=output, cwd=ROOT)
    try:
        while "the node is up" not in log.read_text():
            assert up.poll() is None, f"tasuki up: {log.read_text()}{_log_ends(state_dir)}"
            time.sleep(0.1)
        yield RunningNode(config=config, state_dir=state_dir, model=model, up=up)
    finally:
        stopped = tasuki("down", config, timeout_s=120)
        assert stopped.returncode == 0, f"tasuki down: {stopped.stderr}"
        up.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _log_ends(state_dir: Path) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted((state_dir / "logs").glob("*.log")))
