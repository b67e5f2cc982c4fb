"""The Python of README.md and docs/guides/python.md, run unchanged beside the state folder of a running node, and the README's own node."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.cli.__main__ import INTERRUPTED
from tasuki.config.lock import NODE_LOCK, holder
from tests.conftest import ENVIRONMENT, ROOT, RunningNode, called, tasuki
from tests.extent import IS_WHOLE
from tests.limits import wait_for
from tests.models import make_model, save_checkpoint


@pytest.mark.parametrize(
    ("page", "num_programs"), [("README.md", 1), ("docs/guides/python.md", 2), ("docs/reference/api.md", 1)]
)
def test_client_programs_of_the_page_work(page: str, num_programs: int, node: RunningNode, capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    programs = [block for block in blocks if block.startswith("from tasuki.client import") and "with Client(" in block]
    assert len(programs) == num_programs
    for program in programs:
        with contextlib.chdir(node.state_dir.parent):
            exec(program, {"__name__": "__main__"})
        assert int(capsys.readouterr().out.split()[-1]) >= 1


@pytest.fixture
def own_work() -> Iterator[Path]:
    """Folder with everything that the README expects of a user: configuration, rewards, data and a model."""
    folder = Path(tempfile.mkdtemp(prefix="tasuki-"))  # the path of a unix socket must be short
    page = (ROOT / "README.md").read_text()
    (folder / "node.toml").write_text(block_of(page, "toml", "state_dir"))
    (folder / "rewards.py").write_text(block_of(page, "python", "def exact"))
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) + "\n" for n in range(64)))
    save_checkpoint(make_model("qwen2", seed=0, max_position_embeddings=1024), folder / "models" / "my-model")
    yield folder
    tasuki("down", folder / "node.toml", timeout_s=120)
    shutil.rmtree(folder, ignore_errors=True)  # a tracker of an interrupted run may still write


def block_of(page: str, language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if containing in block)


@pytest.mark.skipif(not IS_WHOLE, reason="starts a node and trains on it by the README alone: in `.ci/run` and `make chaos`")
@pytest.mark.timeout(1800)
def test_commands_of_the_readme_work_as_written(own_work: Path) -> None:
    environment = {**ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"}
    activate, *lines = block_of((ROOT / "README.md").read_text(), "sh", "tasuki up").splitlines()
    assert activate == "source .venv/bin/activate"
    assert [line.split()[1] for line in lines] == ["doctor", "plan", "up", "train", "watch", "down"]
    for line in lines:
        with subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=own_work, env=environment) as command:
            if " train " in line:  # a hundred steps
                wait_for((own_work / "runs" / "first" / "metrics.jsonl").exists, within_s=1200)
            elif " watch " in line:
                time.sleep(5)
            else:
                assert command.wait(600) == 0, line
                continue
            assert command.poll() is None, line
            command.send_signal(signal.SIGINT)
            assert command.wait(120) == INTERRUPTED, line
    audited = called("audit", own_work / "runs" / "first")
    assert audited.returncode == 0, audited.stdout
    assert holder(own_work / "node", name=NODE_LOCK) is None
