"""The folder of a fleet's test, and the demo's task."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "client" / "examples" / "demo"


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder: the path of a unix socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    subprocess.run([sys.executable, DEMO / "make_task.py", folder / "task", "--seed", "0"], check=True)
    shutil.copy(ROOT / "deploy" / "config" / "demo.toml", folder / "demo.toml")
    shutil.copy(DEMO / "reward.py", folder / "reward.py")
    return folder / "demo.toml"
